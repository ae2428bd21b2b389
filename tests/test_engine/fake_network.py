"""A network whose next token depends on every entry of a sequence's KV cache: what stands where, written by which kind.

It writes (token id, kind) into the paged cache by slot_mapping and reads it back through the block tables. Logits are a
hash of all (position, token, kind) read. Any error in a block table, slot, position, length, reused block or the kind
of a position changes the text; reading a slot that nobody wrote fails at once. `expected_tokens` says what must come
out, without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import CacheConfig, Config, EngineConfig
from kernels.routing import RoutingRule
from moe.engine.engine import Engine
from moe.engine.parts import Parts
from moe.engine.tokenizer import Tokenizer
from moe.model.config import GQAConfig, ModelConfig, MoEConfig, RopeConfig
from moe.model.step_input import StepInput
from router.load import LoadCounter
from tests.tiny_models import VOCAB_SIZE, write_tokenizer

PREFILLED, DECODED = 1, 2
NAN_TOKEN = 7  # a sequence that holds it has NaN logits from there on
MASK = (1 << 64) - 1


def fake_config(max_positions: int = 512) -> ModelConfig:
    return ModelConfig(
        family="fake",
        vocab_size=VOCAB_SIZE,
        hidden_size=4,
        num_layers=1,
        dense_dim=4,
        attention=GQAConfig(num_heads=1, num_kv_heads=1, head_dim=1),
        moe=MoEConfig(num_experts=2, expert_dim=4, rule=RoutingRule(top_k=1)),
        sparse_layers=(True,),
        sliding_windows=(0,),
        rope=RopeConfig(theta=10000.0, dim=2),
        norm_eps=1e-6,
        max_positions=max_positions,
        softmax_scale=1.0,
        tie_embeddings=False,
        dtype="float32",
    )


@dataclass
class FakeNetwork:
    """`before_forward` sees each step, for tests that watch or interrupt."""

    before_forward: Callable[[StepInput], None] = field(default=lambda step: None)
    load: LoadCounter | None = None

    def targets(self) -> dict[str, Tensor]:
        return {"embed.weight": torch.zeros(2, 2)}

    def forward(self, step: StepInput, kv_caches: Sequence[Tensor]) -> Tensor:
        self.before_forward(step)
        cache = kv_caches[0]  # [N, 2, P, 1, 1]
        size = cache.shape[2]
        kinds = torch.full_like(step.positions_T, PREFILLED)
        kinds[: step.num_decode] = DECODED
        blocks, offsets = step.slot_mapping_T // size, step.slot_mapping_T % size
        cache[blocks, 0, offsets, 0, 0] = step.token_ids_T.to(cache.dtype)
        cache[blocks, 1, offsets, 0, 0] = kinds.to(cache.dtype)
        histories = self._histories(step, cache)
        wanted = step.logits_rows_B.tolist()
        logits = [hashed_logits(*histories(row), seen=int(step.positions_T[row]) + 1) for row in wanted]
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, VOCAB_SIZE)

    def _histories(self, step: StepInput, cache: Tensor) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """Tokens and kinds that a row sees, read through its sequence's table."""
        tables: list[Tensor] = []
        if step.decode is not None:
            assert step.decode.max_kv_len == int(step.decode.kv_lens_B.max())
            assert step.decode.kv_lens_B.tolist() == (step.positions_T[: step.num_decode] + 1).tolist()
            tables += list(step.decode.block_tables_BM)
        if step.prefill is not None:
            prefill = step.prefill
            lens = prefill.query_starts_B1.diff().tolist()
            assert tuple(lens) == prefill.query_lens_host and tuple(prefill.kv_lens_B.tolist()) == prefill.kv_lens_host
            assert (prefill.query_offsets_B + prefill.query_starts_B1.diff()).tolist() == prefill.kv_lens_B.tolist()
            tables += [table for table, length in zip(prefill.block_tables_BM, lens) for _ in range(length)]
        assert len(tables) == step.token_ids_T.shape[0], "rows and tables differ"

        def read(row: int) -> tuple[np.ndarray, np.ndarray]:
            length = int(step.positions_T[row]) + 1
            positions = torch.arange(length)
            block = tables[row][positions // cache.shape[2]].long()
            seen = cache[block, :, positions % cache.shape[2], 0, 0].numpy()
            assert not np.isnan(seen).any(), "a slot was read that nobody wrote"
            return seen[:, 0].astype(np.uint64), seen[:, 1].astype(np.uint64)

        return read


def hashed_logits(tokens: np.ndarray, kinds: np.ndarray, *, seen: int) -> np.ndarray:
    """fp32 [V] from a history; NaN where it holds NAN_TOKEN."""
    assert len(tokens) == seen
    if (tokens == NAN_TOKEN).any():
        return np.full(VOCAB_SIZE, np.nan, np.float32)
    positions = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(positions * np.uint64(0x9E3779B97F4A7C15) + tokens * np.uint64(4099) + kinds)
        vocab = np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        drawn = _mix(vocab + np.sum(state, dtype=np.uint64))
    logits = (drawn >> np.uint64(40)).astype(np.float32) / np.float32(2**20)  # 0 .. 16
    logits[NAN_TOKEN] = -100.0  # never generated by itself
    return logits


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def expected_tokens(prompt: Sequence[int], count: int, eos_ids: Sequence[int] = ()) -> list[int]:
    """Greedy continuation, worked out without any cache."""
    tokens, kinds = list(prompt), [PREFILLED] * len(prompt)
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in eos_ids):
        history = np.array(tokens, np.uint64), np.array(kinds, np.uint64)
        output.append(int(hashed_logits(*history, seen=len(tokens)).argmax()))
        tokens.append(output[-1])
        kinds.append(DECODED)
    return output


def make_parts(folder: Path | None, network: FakeNetwork | None = None, max_model_len: int = 512) -> Parts:
    """A fake network with the byte-level test tokenizer written to `folder` (None: no tokenizer)."""
    tokenizer = None
    if folder is not None:
        if not (folder / "tokenizer.json").is_file():
            write_tokenizer(folder)
        tokenizer = Tokenizer(folder)
    network = network or FakeNetwork()
    return Parts(network, fake_config(), tokenizer, torch.float32, torch.device("cpu"), max_model_len, "fake")


def make_engine(parts: Parts, *, num_blocks: int = 64, **keys: Any) -> Engine:
    """An engine whose cache is poisoned with NaN. Keys of EngineConfig and CacheConfig by name."""
    cache_keys = {name: keys.pop(name) for name in list(keys) if name in CacheConfig.__dataclass_fields__}
    config = Config(cache=CacheConfig(num_blocks=num_blocks, **cache_keys), engine=EngineConfig(**keys))
    engine = Engine(config, parts=parts)
    for layer in engine.runner.pool.layers:
        layer.fill_(torch.nan)
    return engine
