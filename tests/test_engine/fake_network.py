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
from kv_cache.layout import LayerCache
from moe.engine.engine import Engine
from moe.engine.parts import Parts
from moe.engine.tokenizer import Tokenizer
from moe.model.config import GQAConfig, ModelConfig, MoEConfig, RopeConfig
from moe.model.step_input import StepInput
from router.load import LoadCounter
from tests.tiny_models import VOCAB_SIZE, write_tokenizer

PREFILLED, DECODED = 1, 2
NAN_TOKEN = 7  # a sequence that holds it has NaN logits from there on


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

    def forward(self, step: StepInput, kv_caches: Sequence[LayerCache]) -> Tensor:
        self.before_forward(step)
        cache = kv_caches[0].values  # [N, 2, P, 1, 1]
        size = cache.shape[2]
        kinds = torch.full_like(step.positions_T, PREFILLED)
        kinds[: step.num_decode] = DECODED
        blocks, offsets = step.slot_mapping_T // size, step.slot_mapping_T % size
        cache[blocks, 0, offsets, 0, 0] = step.token_ids_T.to(cache.dtype)
        cache[blocks, 1, offsets, 0, 0] = kinds.to(cache.dtype)
        rows = step.logits_rows_B.numpy()
        if not rows.size:
            return torch.empty(0, VOCAB_SIZE)
        tables_TM = self._tables(step)
        lengths_B = step.positions_T.numpy()[rows] + 1
        positions_L = np.arange(lengths_B.max())
        blocks_BL = tables_TM[rows][:, positions_L // size]
        seen_BL2 = cache.numpy()[blocks_BL, :, positions_L % size, 0, 0]
        known_BL = positions_L < lengths_B[:, None]
        assert not np.isnan(seen_BL2[known_BL]).any(), "a slot was read that nobody wrote"
        tokens_BL, kinds_BL = np.where(known_BL[..., None], seen_BL2, 0).astype(np.uint64).transpose(2, 0, 1)
        return torch.from_numpy(hashed_logits(tokens_BL, kinds_BL))

    def _tables(self, step: StepInput) -> np.ndarray:
        """Every row's own block table [T, M], after checking that the lengths agree with each other."""
        tables: list[np.ndarray] = []
        if step.decode is not None:
            assert step.decode.max_kv_len == int(step.decode.kv_lens_B.max())
            assert step.decode.kv_lens_B.tolist() == (step.positions_T[: step.num_decode] + 1).tolist()
            tables.append(step.decode.block_tables_BM.numpy())
        if step.prefill is not None:
            prefill = step.prefill
            lens = prefill.query_starts_B1.diff()
            assert tuple(lens.tolist()) == prefill.query_lens_host
            assert tuple(prefill.kv_lens_B.tolist()) == prefill.kv_lens_host
            assert (prefill.query_offsets_B + lens).tolist() == prefill.kv_lens_B.tolist()
            tables.append(prefill.block_tables_BM.numpy().repeat(lens.numpy(), axis=0))
        width = max(table.shape[1] for table in tables)
        joined = np.concatenate([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])
        assert len(joined) == step.token_ids_T.shape[0], "rows and tables differ"
        return joined


def hashed_logits(tokens_BL: np.ndarray, kinds_BL: np.ndarray) -> np.ndarray:
    """fp32 [B, V] from histories (kind 0: no position); NaN where one holds NAN_TOKEN."""
    positions_L = np.arange(1, tokens_BL.shape[1] + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state_BL = _mix(positions_L * np.uint64(0x9E3779B97F4A7C15) + tokens_BL * np.uint64(4099) + kinds_BL)
        state_B = np.where(kinds_BL > 0, state_BL, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        vocab_V = np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        drawn_BV = _mix(vocab_V + state_B[:, None])
    logits_BV = (drawn_BV >> np.uint64(40)).astype(np.float32) / np.float32(2**20)  # 0 .. 16
    logits_BV[:, NAN_TOKEN] = -100.0  # never generated by itself
    logits_BV[((tokens_BL == NAN_TOKEN) & (kinds_BL > 0)).any(axis=1)] = np.nan
    return logits_BV


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def expected_tokens(prompt: Sequence[int], count: int, eos_ids: Sequence[int] = ()) -> list[int]:
    """Greedy continuation, worked out without any cache."""
    tokens, kinds = list(prompt), [PREFILLED] * len(prompt)
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in eos_ids):
        history = np.array([tokens], np.uint64), np.array([kinds], np.uint64)
        output.append(int(hashed_logits(*history).argmax()))
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
