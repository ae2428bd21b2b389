"""What a step of the engine takes beside weights and cache, from shapes alone: the largest set of tensors that live at
one time. Knows the order in which the network and the sampler make and drop tensors; allocates nothing.

    a step's peak    max(layers, head, sampler), one after the other
    layers           rows going round, and the largest of: attention, routed experts, dense MLP
    whole            what stands all the time + the largest step (+ the largest decode step again, where graphs hold it)

`tests/test_engine/test_workspace.py` compares with the tensors that the network really makes, and with an H200's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import cdiv
from kernels.decode_cut import decode_parts
from kernels.fp8_tiles import most_rows_apart
from kernels.mla_decode import mla_splits
from kernels.mla_decode_hopper import most_list_bytes
from kernels.quantize import quantized_bytes
from moe.engine.sampler import ROWS_AT_A_TIME
from moe.engine.scheduler import PROMPT_LOGIT_ROWS
from moe.model.config import GQAConfig, MLAConfig, ModelConfig
from moe.model.step_plan import round_length

# Of a row that is sorted, for each id: the row and its sorted and scaled values in fp32, masses and their running sums
# in int64, these as doubles, two masks. The sort itself (values, indices, both twice: 36) takes less.
_SORTED_ROW_BYTES = 3 * 4 + 2 * 8 + 8 + 2
# torch's workspace of the vendor library, once it has multiplied: 32 MiB from compute capability 9.0 on, else 8.125.
_LIBRARY_BYTES = {True: 32 << 20, False: 8320 << 10}


@dataclass(frozen=True)
class StepLimits:
    """The largest steps of an engine."""

    max_batched_tokens: int
    max_num_seqs: int  # at most max_batched_tokens
    max_model_len: int
    block_size: int
    mla_tokens: int  # engine.mla_workspace_tokens

    @property
    def logits_rows(self) -> int:
        """Of a prefill step."""
        return min(self.max_batched_tokens, self.max_num_seqs + PROMPT_LOGIT_ROWS)


@dataclass(frozen=True)
class Workspace:
    """Bytes of one rank. `standing`: tables, copies and buffers that are there all the time."""

    standing: int
    prefill: int
    decode: int
    graphs: bool

    @property
    def num_bytes(self) -> int:
        return self.standing + max(self.prefill, self.decode) + (self.decode if self.graphs else 0)


@dataclass(frozen=True)
class Device:
    """What of a device the working space depends on. `hopper`: compute capability 9.0 or above."""

    hopper: bool = True
    graphs: bool = True


def prompt_chunks(limits: StepLimits, *, latent: bool) -> list[tuple[int, int]]:
    """(new tokens, keys) of the prompts of the largest prefill step: whole prompts, as few as max_model_len allows.

    `latent`: MLA expands the keys, mla_tokens at a time; so many prompts with keys from before that it does, twice.
    """
    tokens, longest = limits.max_batched_tokens, limits.max_model_len
    if not latent:
        lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
        return [(length, length) for length in lengths]
    whole = round_length(limits.block_size, limits.mla_tokens)
    keys = min(longest, 2 * whole)
    expanded = cdiv(min(keys, whole), limits.block_size) * limits.block_size
    number = min(tokens, max(cdiv(tokens, keys), limits.mla_tokens // expanded, 1))
    lengths = [tokens // number + (index < tokens % number) for index in range(number)]
    return [(length, keys) for length in lengths]


def measure_by_shapes(
    model: ModelConfig,
    dtype: torch.dtype,
    limits: StepLimits,
    device: Device,
    *,
    num_ranks: int = 1,
    row_cap: int | None = None,
    offloaded: bool = False,
) -> Workspace:
    """The working space of a rank. `row_cap`: of rows between ranks; `offloaded`: experts are in host memory."""
    step = _Step(model, dtype.itemsize, limits, device, num_ranks, row_cap, offloaded)
    return Workspace(
        standing=step.standing(),
        prefill=step.peak(limits.max_batched_tokens, limits.logits_rows, decodes=False),
        decode=step.peak(limits.max_num_seqs, limits.max_num_seqs, decodes=True),
        graphs=device.graphs,
    )


@dataclass(frozen=True)
class _Step:
    model: ModelConfig
    item: int  # bytes of a number of the model's dtype
    limits: StepLimits
    device: Device
    num_ranks: int
    row_cap: int | None
    offloaded: bool

    def peak(self, rows: int, logits_rows: int, *, decodes: bool) -> int:
        model, limits = self.model, self.limits
        stream = rows * model.hidden_size * self.item  # one tensor of all rows
        sparse, dense = any(model.sparse_layers), not all(model.sparse_layers)
        attention, planned = model.attention, 0  # the plan's list of decode's pieces, which stands while layers run
        if decodes and isinstance(attention, MLAConfig):
            planned = most_list_bytes(rows, attention.num_heads, limits.max_model_len)
        # The rows that came in, normalised and not, are held by the caller until the layer gives its own.
        layers = [2 * stream + self._attention(rows, decodes=decodes), 5 * stream]
        layers += [4 * stream + self._experts(rows, stream)] if sparse else []
        layers += [4 * stream + max(rows * model.dense_dim * self.item + stream, 3 * stream)] if dense else []
        wanted = 0 if decodes else logits_rows * model.hidden_size * self.item
        logits = logits_rows * model.vocab_size * 4
        drawn = min(limits.max_num_seqs, logits_rows)
        sorted_rows = min(drawn, ROWS_AT_A_TIME) * _SORTED_ROW_BYTES + 8  # and their ranks
        edited = (drawn * 4 + sorted_rows) * model.vocab_size
        return max(max(layers) + planned, stream + wanted + logits, logits + edited)

    def standing(self) -> int:
        model, limits = self.model, self.limits
        rope = limits.max_model_len * model.rope.dim * 4
        tables = 2 * limits.max_num_seqs * cdiv(limits.max_model_len, limits.block_size) * 4  # places, a step's
        inputs = limits.max_batched_tokens * 3 * 8
        absorbed = 0
        if isinstance(attention := model.attention, MLAConfig):
            per_layer = attention.num_heads * attention.kv_lora_rank * attention.qk_nope_head_dim
            absorbed = model.num_layers * per_layer * self.item
        return rope + tables + inputs + absorbed + _LIBRARY_BYTES[self.device.hopper]

    def _attention(self, rows: int, *, decodes: bool) -> int:
        attention = self.model.attention
        if isinstance(attention, GQAConfig):
            return self._gqa(attention, rows, decodes=decodes)
        return self._latent_decode(attention, rows) if decodes else self._latent_prefill(attention, rows)

    def _gqa(self, attention: GQAConfig, rows: int, *, decodes: bool) -> int:
        """Queries, keys and values as they were projected and queries turned, until the output is."""
        H, G, C = attention.num_heads, attention.num_kv_heads, attention.head_dim
        projected, heads = rows * (H + 2 * G) * C * self.item, rows * H * C * self.item
        longest, windows = self.limits.max_model_len, set(self.model.sliding_windows)
        parts = max(decode_parts(rows, G, longest, window) for window in windows)
        beside = rows * H * (parts * (C + 2) * 4 if decodes else 4)
        return projected + heads + heads + max(beside, rows * self.model.hidden_size * self.item)

    def _latent(self, attention: MLAConfig, rows: int) -> int:
        """Queries and latents as they were projected, and queries whose latents have been."""
        H, C, Q = attention.num_heads, attention.qk_head_dim, attention.q_lora_rank
        first = (H * C if Q is None else Q) + attention.kv_lora_rank + attention.qk_rope_head_dim
        return rows * (first + (0 if Q is None else H * C)) * self.item

    def _latent_decode(self, attention: MLAConfig, rows: int) -> int:
        H, L, V = attention.num_heads, attention.kv_lora_rank, attention.v_head_dim
        splits = mla_splits(H, self.limits.max_model_len)
        of_latents, out = rows * H * L * self.item, rows * H * V * self.item
        parts = rows * splits * H * (L * min(self.item, 4) + 4)
        after = max(of_latents + out, out + rows * self.model.hidden_size * self.item)
        return self._latent(attention, rows) + max(2 * of_latents + parts, after)

    def _latent_prefill(self, attention: MLAConfig, rows: int) -> int:
        """Keys and values of a round, expanded; with several rounds three results in fp32: merged, last, this one's."""
        H, V, limits = attention.num_heads, attention.v_head_dim, self.limits
        chunks, page = prompt_chunks(limits, latent=True), limits.block_size
        whole = round_length(page, limits.mla_tokens)
        keys = [cdiv(min(length, whole), page) * page for _, length in chunks]
        expanded = min(sum(keys), max(limits.mla_tokens // page * page, max(keys)))
        wide = expanded * H * (attention.qk_nope_head_dim + V) * self.item
        latents, rest = (expanded * width * self.item for width in (attention.kv_lora_rank, attention.qk_rope_head_dim))
        joined = 0 if self.device.hopper else expanded * H * attention.qk_head_dim * self.item
        out, result = rows * H * V * self.item, rows * H * (V + 1) * 4
        if max(length for _, length in chunks) <= whole:
            inside = max(latents + rest + wide, rest + wide + joined + out + rows * H * 4)
        else:
            inside = 2 * result + max(latents + rest + wide, rest + wide + joined + result, out)
        return self._latent(attention, rows) + max(inside, out + rows * self.model.hidden_size * self.item)

    def _experts(self, rows: int, stream: int) -> int:
        """Routing, the experts' rows between and after their products, then shared rows, the sum and its norm."""
        moe, D = self.model.moe, self.model.hidden_size
        pairs = rows * moe.rule.top_k
        here = pairs * self.num_ranks  # all ranks' rows may meet at one, in rounds
        if self.row_cap is not None and self.num_ranks > 1:
            here = min(here, self.row_cap)
        between, after = here * moe.expert_dim * self.item, here * D * self.item
        products = between + after
        if self.model.fp8_experts:
            own, packed, inner = (quantized_bytes(*each) for each in ((rows, D), (here, D), (here, moe.expert_dim)))
            if self.offloaded:
                products = max(own + packed, packed + products + inner)
            else:
                # Quantised where it is made, or, of fewer rows, packed before and quantised after the first product.
                sizes = cdiv(moe.num_experts, self.num_ranks), 2 * moe.expert_dim * D
                apart = most_rows_apart(here, *sizes) / here if self.device.hopper else 1.0
                products = max(own + int(apart * (between + max(packed, inner))), own + inner, inner + after)
        shared = rows * moe.shared_dim * self.item
        summed = after + max(shared + stream, 2 * stream + (stream if shared else 0))
        return pairs * 4 * 4 + max(products, summed)
