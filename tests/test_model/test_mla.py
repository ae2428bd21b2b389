"""MLA's bounded prefill: rounds, workspace, empty parts; and the plan of a step by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe.model.causal_lm import CausalLM
from moe.model.load_model import load_model
from moe.model.step_input import PrefillBatch, StepInput
from moe.model.step_plan import ROUND_TOKENS, plan_mla_rounds, plan_step, round_length
from tests.compare import assert_same_bits, max_rel
from tests.step_driver import StepDriver
from tests.tiny_models import VOCAB_SIZE, write_tiny

UNBOUNDED = 512  # workspace rows: every prompt here fits in one round


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek_v3")
    model = write_tiny(folder, "deepseek_v3")
    assert model.config.v_head_dim != model.config.qk_nope_head_dim, "the case asks for unlike widths"
    return folder


def load(folder: Path, workspace: int) -> CausalLM:
    return load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=512,
        mla_workspace_tokens=workspace,
    )


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


PREFIXES = {"forty": 40, "none": 0, "sixteen": 16, "seventeen": 17}


@pytest.mark.parametrize("chunk", [1, 16, 17, 64])
@pytest.mark.parametrize("workspace", [16, 48, UNBOUNDED])
def test_C38_cached_prefixes_of_unlike_length_in_one_step(folder: Path, chunk: int, workspace: int) -> None:
    """Prefixes 40, 0, 16 and 17 and a chunk each, together and alone, against the whole prompt in one unbounded piece.

    Workspace 16: one block per round, so the third round of a batch holds the first sequence alone and the others are
    empty parts. 48: sequences take turns, and a context of 49 and more passes it.
    """
    unbounded, bounded = load(folder, UNBOUNDED), load(folder, workspace)
    prompts = {name: tokens_of(prefix + chunk, seed=prefix) for name, prefix in PREFIXES.items()}
    together = StepDriver(bounded, seed=1)
    for name, prefix in PREFIXES.items():
        if prefix:
            together.run(prefill={name: prompts[name][:prefix]})
    rows = together.run(prefill={name: prompts[name][prefix:] for name, prefix in PREFIXES.items()}, hidden=True)
    for name, prefix in PREFIXES.items():
        whole_TD = StepDriver(unbounded).run(prefill={name: prompts[name]}, hidden=True)[name]
        assert max_rel(rows[name], whole_TD[prefix:]) < 1e-5, name
        alone = StepDriver(bounded, seed=2)
        if prefix:
            alone.run(prefill={name: prompts[name][:prefix]})
        assert_same_bits(alone.run(prefill={name: prompts[name][prefix:]}, hidden=True)[name], rows[name])


@pytest.mark.parametrize("length", [32, 33])  # as long as the workspace, and one token longer
def test_C38_a_context_one_token_longer_than_the_workspace(folder: Path, length: int) -> None:
    prompt = tokens_of(length, seed=9)
    whole_TD = StepDriver(load(folder, UNBOUNDED)).run(prefill={"a": prompt}, hidden=True)["a"]
    bounded_TD = StepDriver(load(folder, 32)).run(prefill={"a": prompt}, hidden=True)["a"]
    assert max_rel(bounded_TD, whole_TD) < 1e-5


def test_C38_greedy_text_does_not_depend_on_chunk_or_workspace(folder: Path) -> None:
    prompt = tokens_of(70, seed=4)
    texts = [
        StepDriver(load(folder, workspace)).greedy("a", prompt, 12, chunk=chunk)
        for workspace, chunk in ((UNBOUNDED, 70), (16, 16), (32, 17), (32, 70), (64, 64))
    ]
    assert all(text == texts[0] for text in texts)


def batch(query_lens: list[int], kv_lens: list[int], page_size: int) -> PrefillBatch:
    """Sequence b's block j is block 100 * b + j."""

    def int32(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    width = max(-(-kv_len // page_size) for kv_len in kv_lens)
    return PrefillBatch(
        block_tables_BM=int32([[100 * b + j for j in range(width)] for b in range(len(kv_lens))]),
        query_starts_B1=int32([sum(query_lens[:b]) for b in range(len(query_lens) + 1)]),
        query_offsets_B=int32([kv - q for kv, q in zip(kv_lens, query_lens)]),
        kv_lens_B=int32(kv_lens),
        max_query_len=max(query_lens),
        max_kv_len=max(kv_lens),
        query_lens_host=tuple(query_lens),
        kv_lens_host=tuple(kv_lens),
    )


def test_rounds_by_hand() -> None:
    """Pages of 4, workspace of 8: W = 8. Three sequences with 11, 3 and 9 keys.

    Round 0 takes 8, 3 (one page) and 8 keys: no two fit together. Round 1 takes 3, none and 1 keys: one page each, so
    they fit together and the middle one rides along empty.
    """
    rounds = plan_mla_rounds(batch([2, 3, 9], [11, 3, 9], page_size=4), page_size=4, workspace_tokens=8)
    assert [(part.index, part.row_start, part.row_stop, part.num_rows) for part in rounds] == [
        (0, 0, 2, 8),
        (0, 2, 5, 4),
        (0, 5, 14, 8),
        (1, 0, 14, 8),
    ]
    last = rounds[-1]
    assert last.kv_lens_B.tolist() == [3, 0, 1]
    assert last.kv_starts_B.tolist() == [8, 0, 8]
    assert last.row_starts_B1.tolist() == [0, 4, 4, 8]
    assert last.workspace_tables_BM.tolist() == [[0], [0], [1]]
    assert last.query_starts_B1.tolist() == [0, 2, 5, 14]
    assert last.query_offsets_B.tolist() == [9, 0, 0]
    assert (last.max_query_len, last.max_kv_len) == (9, 3)


def test_pieces_of_rounds() -> None:
    """As above, with pieces of 4 queries. In round 1 the first sequence's queries stand at 9 and 10 and see 3 keys from
    8 on; the second has none there; of the third's three pieces, up to positions 3, 7 and 8, the last sees one."""
    given = batch([2, 3, 9], [11, 3, 9], page_size=4)
    *_, last = plan_mla_rounds(given, page_size=4, workspace_tokens=8, piece_queries=4)
    assert last.pieces_I is not None
    listed = [(piece & 0xFFFF, piece >> 16) for piece in last.pieces_I.tolist()]
    assert listed == [(0, 0), (2, 2), (1, 0), (2, 0), (2, 1)]
    # Whatever the batch, kernels see the same alignment.
    assert all(part.storage_offset() % 4 == 0 for part in (last.query_starts_B1, last.kv_lens_B, last.pieces_I))


def test_pieces_of_a_step_without_rounds() -> None:
    one_token = torch.zeros(14, dtype=torch.int64)
    step = StepInput(one_token, one_token, one_token, 0, None, batch([2, 3, 9], [11, 3, 9], 4), one_token[:3])
    pieces_I = plan_step(step, 4, None, None, piece_queries=4).pieces_I
    assert pieces_I is not None
    assert [(piece & 0xFFFF, piece >> 16) for piece in pieces_I.tolist()] == [(0, 0), (2, 2), (2, 1), (2, 0), (1, 0)]
    assert plan_step(step, 4, None, None).pieces_I is None


def test_every_key_is_expanded_once_and_the_workspace_is_never_exceeded() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(30):
        page_size, workspace = (16, 16 * (1 + trial % 5) + trial % 3)
        kv_lens = torch.randint(1, 120, (1 + trial % 7,), generator=generator).tolist()
        rounds = plan_mla_rounds(batch([1] * len(kv_lens), kv_lens, page_size), page_size, workspace)
        assert all(0 < part.num_rows <= workspace for part in rounds)
        assert [part.index for part in rounds] == sorted(part.index for part in rounds)
        seen: dict[int, list[int]] = {b: [] for b in range(len(kv_lens))}
        for part in rounds:
            for b, start, count in zip(
                range(part.row_start, part.row_stop), part.kv_starts_B.tolist(), part.kv_lens_B.tolist()
            ):
                seen[b] += range(start, start + count)
        assert seen == {b: list(range(kv_len)) for b, kv_len in enumerate(kv_lens)}


def test_round_length() -> None:
    """Whole pages, the same for every step, at most ROUND_TOKENS; a workspace below one page is refused."""
    assert round_length(16, 32768) == ROUND_TOKENS
    assert round_length(48, 32768) == ROUND_TOKENS // 48 * 48
    assert round_length(16, 47) == 32
    with pytest.raises(ValueError, match=r"engine\.mla_workspace_tokens=15 .*cache\.block_size=16"):
        round_length(16, 15)
