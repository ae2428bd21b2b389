"""Drive a network step by step from token lists, with a plain paged cache: blocks lie scattered, unused memory is NaN.

Knows `StepInput` and the shape of a layer's cache; knows nothing of the engine's scheduler or allocator, so that a
fault there cannot hide one in the network.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_cache.layout import KVLayout, LayerScales, Quantization
from kv_cache.pool import KVPool
from moe.model.causal_lm import CausalLM
from moe.model.config import GQAConfig
from moe.model.step_input import DecodeBatch, PrefillBatch, StepInput


@dataclass
class Track:
    """One sequence: the tokens whose keys are in the cache, and the blocks they lie in."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class StepDriver:
    """Sequences by name over one cache. `run` makes one step of decode rows and prefill chunks together."""

    def __init__(
        self,
        model: CausalLM,
        *,
        block_size: int = 16,
        num_blocks: int = 96,
        seed: int = 0,
        quantization: Quantization = "none",
        layer_scales: tuple[LayerScales, ...] = (),
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.num_blocks = num_blocks
        self.tracks: dict[str, Track] = {}
        attention, num_layers = model.config.attention, model.config.num_layers
        kinds = (model.dtype, quantization, layer_scales)
        if isinstance(attention, GQAConfig):
            layout = KVLayout.gqa(num_layers, block_size, attention.num_kv_heads, attention.head_dim, *kinds)
        else:
            widths = (attention.kv_lora_rank, attention.qk_rope_head_dim)
            layout = KVLayout.mla(num_layers, block_size, *widths, *kinds)
        self.pool = KVPool(layout, num_blocks, model.device)
        for layer in self.pool.layers:
            layer.view(torch.uint8).fill_(255)  # NaN in every dtype
        self.kv_caches = self.pool.caches

    def run(
        self,
        prefill: Mapping[str, Sequence[int]] | None = None,
        decode: Mapping[str, int] | None = None,
        *,
        hidden: bool = False,
    ) -> dict[str, Tensor]:
        """One step; for each sequence the logits (or last hidden states) of all its rows, in its tokens' order."""
        chunks = [(name, [token]) for name, token in (decode or {}).items()]
        chunks += [(name, list(tokens)) for name, tokens in (prefill or {}).items()]
        assert len({name for name, _ in chunks}) == len(chunks), "a sequence has either a decode row or a chunk"
        step = self.plan(chunks, num_decode=len(decode or {}))
        rows = (self.model.hidden if hidden else self.model.forward)(step, self.kv_caches)
        parts = rows.split([len(tokens) for _, tokens in chunks])
        return {name: part for (name, _), part in zip(chunks, parts, strict=True)}

    def greedy(self, name: str, prompt: Sequence[int], num_tokens: int, chunk: int | None = None) -> list[int]:
        """Prefill the prompt, whole or in chunks, then decode one token after another."""
        chunk = chunk or len(prompt)
        logits = torch.empty(0)
        for start in range(0, len(prompt), chunk):
            logits = self.run(prefill={name: prompt[start : start + chunk]})[name]
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.run(decode={name: tokens[-1]})[name][-1].argmax()))
        return tokens

    def plan(self, chunks: list[tuple[str, list[int]]], num_decode: int) -> StepInput:
        """The tensors of a step of these sequences and their new tokens, the first `num_decode` of them decode rows."""
        ids, positions, slots, offsets = [], [], [], []
        for name, tokens in chunks:
            track = self.tracks.setdefault(name, Track())
            offset = len(track.tokens)
            offsets.append(offset)
            track.tokens += tokens
            while len(track.blocks) * self.block_size < len(track.tokens):
                track.blocks.append(self.free.pop())
            ids += tokens
            for position in range(offset, len(track.tokens)):
                positions.append(position)
                block = track.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
        device = self.model.device
        decode = [self.tracks[name] for name, _ in chunks[:num_decode]]
        prefill = [self.tracks[name] for name, _ in chunks[num_decode:]]
        return StepInput(
            token_ids_T=torch.tensor(ids, dtype=torch.int64, device=device),
            positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=device),
            num_decode=num_decode,
            decode=self._decode_batch(decode) if decode else None,
            prefill=self._prefill_batch(prefill, offsets[num_decode:]) if prefill else None,
            logits_rows_B=torch.arange(len(ids), device=device),
        )

    def _decode_batch(self, tracks: list[Track]) -> DecodeBatch:
        kv_lens = [len(track.tokens) for track in tracks]
        return DecodeBatch(self._tables(tracks), self._int32(kv_lens), max(kv_lens))

    def _prefill_batch(self, tracks: list[Track], offsets: list[int]) -> PrefillBatch:
        kv_lens = [len(track.tokens) for track in tracks]
        query_lens = [kv_len - offset for kv_len, offset in zip(kv_lens, offsets)]
        starts = [sum(query_lens[:b]) for b in range(len(tracks) + 1)]
        return PrefillBatch(
            block_tables_BM=self._tables(tracks),
            query_starts_B1=self._int32(starts),
            query_offsets_B=self._int32(offsets),
            kv_lens_B=self._int32(kv_lens),
            max_query_len=max(query_lens),
            max_kv_len=max(kv_lens),
            query_lens_host=tuple(query_lens),
            kv_lens_host=tuple(kv_lens),
        )

    def _tables(self, tracks: list[Track]) -> Tensor:
        """Unused entries name any block, as the contract allows: here random ones."""
        width = max(len(track.blocks) for track in tracks) + 1
        rows = [
            track.blocks + [self.random.randrange(self.num_blocks) for _ in range(width - len(track.blocks))]
            for track in tracks
        ]
        return self._int32(rows)

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.device)
