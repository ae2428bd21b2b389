"""Grouped-query attention of one layer: project, normalise, rotate, write the cache, read it back. Knows no MLP.

Decode rows and prefill rows take different kernels; both read keys and values from the paged cache, also those that
this very step wrote.
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention_decode import attention_decode
from kernels.attention_decode_rows import stores_new
from kernels.attention_prefill import attention_prefill, piece_queries
from kernels.kv_int4 import Int4Scales
from kernels.kv_quantize import KVScales
from kernels.new_rows import NewRows
from kernels.qk_rope_store import qk_rope_store
from kernels.split_kv import SplitRule
from kernels.turn_heads import HeadNorms, Rope
from kv_cache.layout import LayerCache
from moe.model.config import GQAConfig, ModelConfig
from moe.model.linear import Parameters
from moe.model.step_plan import StepPlan


def _scales(cache: LayerCache) -> KVScales | Int4Scales | None:
    if cache.scales is None:
        return None
    of_keys, of_values = cache.scales.unbind(1)
    if cache.quantization == "int4":
        return Int4Scales(of_keys, of_values)
    return KVScales(of_keys, of_values, given=cache.quantization == "fp8-layer", saturated_1=cache.saturated_1)


def with_rows_behind(rows: Tensor, number: int) -> Tensor:
    """The first of `number` rows, where the others are still to come: many, and so they are written once."""
    whole = rows.new_empty(number, *rows.shape[1:])
    whole[: rows.shape[0]] = rows
    return whole


class GQAttention:
    """H query heads share G key/value heads of width C. The cache of a layer is [N, 2, P, G, C]: keys, then values.

    In e4m3 and int4 its scales go with it (`LayerCache.scales`).
    """

    def __init__(self, config: ModelConfig, index: int, parameters: Parameters, cos_sin_PR: Tensor) -> None:
        assert isinstance(config.attention, GQAConfig), f"layer {index} is no grouped-query attention"
        name = f"layers.{index}.attn"
        self.heads = config.attention
        self.window = config.sliding_windows[index]
        self.scale = config.softmax_scale
        self.interleaved = config.rope.interleaved
        self.cos_sin_PR = cos_sin_PR
        self.qkv = parameters.linear(f"{name}.qkv")
        self.o = parameters.linear(f"{name}.o")
        q_norm_C, k_norm_C = (parameters.get(f"{name}.{which}_norm.weight") for which in "qk")
        self.norms: HeadNorms | None = None
        if q_norm_C is not None and k_norm_C is not None:
            self.norms = HeadNorms(q_norm_C, k_norm_C, config.norm_eps)

    def piece_queries(self, cache: LayerCache) -> int | None:
        """Queries of a piece in the list that prefill takes with such a cache; None: it reads no list."""
        q_THC = self.qkv.weight_NK.new_empty(0, self.heads.num_heads, self.heads.head_dim)
        k_cache_NPGC, v_cache_NPGV = cache.values.unbind(1)
        return piece_queries(q_THC, k_cache_NPGC, v_cache_NPGV, _scales(cache))

    def decode_rule(self, cache: LayerCache) -> SplitRule | None:
        """By which the pieces of decode are listed; None: it reads no list."""
        return None

    def __call__(self, x_TD: Tensor, plan: StepPlan, cache: LayerCache) -> Tensor:
        step = plan.step
        H, G, C = self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim
        q_THC, k_TGC, v_TGC = self.qkv(x_TD).view(-1, H + 2 * G, C).split((H, G, G), dim=1)
        k_cache_NPGC, v_cache_NPGC = cache.values.unbind(1)
        scales = _scales(cache)
        rope = Rope(step.positions_T, self.cos_sin_PR, self.interleaved)
        new: NewRows | None = None
        rows = NewRows(k_TGC, v_TGC, self.norms, rope, step.slot_mapping_T)
        decodes_alone = step.prefill is None and step.decode is not None
        if decodes_alone and stores_new(q_THC, k_cache_NPGC, v_cache_NPGC, scales, rows):
            new = rows
        else:
            q_THC = qk_rope_store(
                q_THC, k_TGC, v_TGC, self.norms, rope, k_cache_NPGC, v_cache_NPGC, step.slot_mapping_T, scales
            )

        out_THC = q_THC[:0]
        if step.decode is not None:
            out_THC = attention_decode(
                q_THC[: step.num_decode],
                k_cache_NPGC,
                v_cache_NPGC,
                step.decode.block_tables_BM,
                step.decode.kv_lens_B,
                scale=self.scale,
                window=self.window,
                max_kv_len=step.decode.max_kv_len,
                scales=scales,
                new=new,
            )
        if step.prefill is not None:
            out_THC = with_rows_behind(out_THC, q_THC.shape[0])
            attention_prefill(
                q_THC[step.num_decode :],
                k_cache_NPGC,
                v_cache_NPGC,
                step.prefill.block_tables_BM,
                step.prefill.query_starts_B1,
                step.prefill.query_offsets_B,
                step.prefill.kv_lens_B,
                scale=self.scale,
                window=self.window,
                max_query_len=step.prefill.max_query_len,
                max_kv_len=step.prefill.max_kv_len,
                scales=scales,
                pieces_I=plan.pieces_I,
                out_THV=out_THC[step.num_decode :],
            )
        return self.o(out_THC.reshape(-1, H * C))
