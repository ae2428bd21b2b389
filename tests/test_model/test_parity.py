"""The network against transformers' model classes: fp32 on the CPU, every family, both layouts on disk.

Tiny checkpoints with every tensor random. transformers ignores norm_topk_prob for DeepSeek-V2 and always scales, so the
V2 variants leave it false, where the two agree. Greedy text is compared by one pass of transformers over prompt and
answer: if each token is its argmax there, its own greedy loop would have written the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.model.causal_lm import CausalLM
from moe.model.load_model import load_model
from tests.compare import assert_same_bits, max_rel
from tests.step_driver import StepDriver
from tests.tiny_models import FAMILIES, VARIANTS, VOCAB_SIZE, write_tiny, write_variant

TOLERANCE = 2e-4  # the project's bar for logits: max |a - b| / max |b|


class Pair(NamedTuple):
    ours: CausalLM
    theirs: PreTrainedModel


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, dtype=dtype, device=torch.device("cpu"), max_model_len=512, mla_workspace_tokens=256)


def prompts(*lengths: int, seed: int = 0) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {str(n): torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths}


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_variant(folder, request.param)
    return Pair(load(folder), theirs)


def test_prefill_of_several_prompts_in_one_step(pair: Pair) -> None:
    """1: no context; 16 and 17: a full block and one more token; 70: several blocks and tiles."""
    tokens = prompts(1, 16, 17, 70)
    ours = StepDriver(pair.ours).run(prefill=tokens)
    for name, prompt in tokens.items():
        assert max_rel(ours[name], logits_of(pair.theirs, prompt)) <= TOLERANCE, name


def test_chunks_and_decode_rows_mixed_in_one_step(pair: Pair) -> None:
    """One sequence decodes while two others are prefilled in chunks of unlike sizes: every row as in transformers."""
    tokens = prompts(23, 40, 41)
    follow = prompts(5, seed=1)["5"]
    driver = StepDriver(pair.ours)
    driver.run(prefill={"23": tokens["23"]})
    rows: dict[str, list[Tensor]] = {"23": [], "40": [], "41": []}
    for step, token in enumerate(follow):
        chunks = {
            "40": tokens["40"][step * 8 : (step + 1) * 8],
            "41": tokens["41"][max(step * 10 - 9, 0) : step * 10 + 1],  # 1 token, then tens
        }
        for name, part in driver.run(prefill=chunks, decode={"23": token}).items():
            rows[name].append(part)
    expected = {"23": logits_of(pair.theirs, tokens["23"] + follow)[23:]}
    expected |= {name: logits_of(pair.theirs, tokens[name]) for name in ("40", "41")}
    for name, parts in rows.items():
        assert max_rel(torch.cat(parts), expected[name]) <= TOLERANCE, name


def test_greedy_text(pair: Pair) -> None:
    """24 tokens after a prompt prefilled whole and in chunks: the same text, and each token transformers' argmax."""
    prompt = prompts(37)["37"]
    driver = StepDriver(pair.ours)
    whole = driver.greedy("whole", prompt, 24)
    assert whole == driver.greedy("chunked", prompt, 24, chunk=16)
    assert whole == logits_of(pair.theirs, prompt + whole)[36:-1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_C07_both_layouts_and_spellings_give_the_same_bits(family: str, tmp_path: Path) -> None:
    """One tensor per expert in three shards as transformers 4 spells its config; all experts stacked as 5 does."""
    theirs = write_tiny(tmp_path / "original", family, layout="original", shards=3, config_style="v4")
    write_tiny(tmp_path / "stacked", family, layout="stacked")
    tokens = prompts(20)
    logits = [StepDriver(load(tmp_path / layout)).run(prefill=tokens)["20"] for layout in ("original", "stacked")]
    assert_same_bits(*logits)
    assert max_rel(logits[0], logits_of(theirs, tokens["20"])) <= TOLERANCE


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_C11_the_flag_is_read_from_the_checkpoint(norm_topk_prob: bool, tmp_path: Path) -> None:
    """Qwen3-MoE with and without renormalised weights, 64 greedy tokens each as transformers writes them."""
    theirs = write_tiny(tmp_path, "qwen3_moe", norm_topk_prob=norm_topk_prob)
    prompt = prompts(9)["9"]
    text = StepDriver(load(tmp_path)).greedy("a", prompt, 64)
    assert text == logits_of(theirs, prompt + text)[8:-1].argmax(dim=-1).tolist()


def test_C11_the_two_settings_differ(tmp_path: Path) -> None:
    """The test above can fail: the same weights under the other flag give other logits."""
    tokens = prompts(9)
    rows = []
    for flag in (False, True):
        write_tiny(tmp_path / str(flag), "qwen3_moe", norm_topk_prob=flag)
        rows.append(StepDriver(load(tmp_path / str(flag))).run(prefill=tokens)["9"])
    assert max_rel(rows[0], rows[1]) > 0.01


def test_C11_deepseek_v2_renormalises_where_its_config_says_so(tmp_path: Path) -> None:
    """The reference's rule, which transformers leaves out: with norm_topk_prob the weights sum to 1 and are not scaled.

    transformers with the scale set to make its weights sum to 1 cannot say it; so the router is asked itself.
    """
    write_tiny(tmp_path, "deepseek_v2", norm_topk_prob=True, routed_scaling_factor=3.0)
    model = load(tmp_path)
    layer = next(block.mlp for block in model.blocks if hasattr(block.mlp, "gate"))
    weights_TK = layer.gate(torch.randn(50, 64)).weights_TK  # pyright: ignore
    torch.testing.assert_close(weights_TK.sum(dim=1), torch.ones(50))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stays_near_fp32(family: str, tmp_path: Path) -> None:
    """A bf16 network on the CPU against transformers in fp32 with the same stored weights: only rounding differs."""
    theirs = write_tiny(tmp_path, family, dtype="bfloat16")
    tokens = prompts(40)
    ours = StepDriver(load(tmp_path, torch.bfloat16)).run(prefill=tokens)["40"]
    assert ours.dtype == torch.float32
    difference = (ours - logits_of(theirs, tokens["40"])).norm(dim=1) / logits_of(theirs, tokens["40"]).norm(dim=1)
    # The median row: a near tie of two experts may flip in a single row, which moves it by far more than rounding.
    assert float(difference.median()) < 0.04
