"""Multi-head latent attention of one layer: the cache holds one latent and one rotary key per position, for all heads.

Knows no routing. The same attention twice, in two algebras (they differ in bits, so a position's kind is fixed):

    decode, absorbed:  score = (W_UK^T q_nope) . c + q_pe . k_pe;   out = W_UV (sum of p * c)       reads latents only
    prefill, expanded: k = [W_UK c, k_pe], v = W_UV c;              plain attention over k, v       expands latents

with c the normalised latent of width L and k_pe the rotated key. Prefill expands a bounded number of rows, round by
round (`step_plan.py`), and merges the rounds in order by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.absorb_rope_store import absorb_rope_store
from kernels.attention_merge import merge_attention
from kernels.attention_prefill import attention_prefill, piece_queries
from kernels.gather import LatentScaling, gather_paged
from kernels.latent_rope_store import latent_rope_store
from kernels.linear import head_linear
from kernels.mla_decode_hopper import list_rule
from kernels.mla_order import PieceList
from kernels.mla_values import mla_decode_values
from kernels.rmsnorm import rmsnorm
from kernels.split_kv import SplitRule
from kernels.turn_heads import Rope
from kv_cache.layout import LayerCache
from moe.model.attention import with_rows_behind
from moe.model.config import MLAConfig, ModelConfig
from moe.model.linear import Linear, Parameters
from moe.model.step_input import DecodeBatch
from moe.model.step_plan import MLARound, StepPlan

# The latents' norms have this epsilon in every released checkpoint's own code, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def _join(parameters: Parameters, *names: str) -> Linear:
    """These products of the same rows as one, whose columns follow each other: one launch reads one stretch of weights.

    Before anything is loaded: their parameters become parts of the joint ones.
    """
    weights = [parameters[f"{name}.weight"] for name in names]
    rows = [weight_NK.shape[0] for weight_NK in weights]
    joint_NK = weights[0].new_empty(sum(rows), weights[0].shape[1])
    parameters.tensors |= {f"{name}.weight": part for name, part in zip(names, joint_NK.split(rows))}
    bias_N: Tensor | None = None
    if any(parameters.get(f"{name}.bias") is not None for name in names):
        bias_N = weights[0].new_zeros(sum(rows))
        parts = zip(names, bias_N.split(rows))
        parameters.tensors |= {f"{name}.bias": part for name, part in parts if f"{name}.bias" in parameters.tensors}
    joint = parameters.linears[" + ".join(names)] = Linear(joint_NK, bias_N)
    return joint


class MLAttention:
    """H heads over one latent (width L) and one rotary key (width R) per position. A layer's cache is [N, P, L + R].

    In e4m3 two scales for each row go with it, the latent's and the rotary key's, [N, P, 2].
    """

    def __init__(self, config: ModelConfig, index: int, parameters: Parameters, cos_sin_PR: Tensor) -> None:
        assert isinstance(config.attention, MLAConfig), f"layer {index} is no latent attention"
        name = f"layers.{index}.attn"
        self.dims = config.attention
        self.scale = config.softmax_scale
        self.interleaved = config.rope.interleaved
        self.cos_sin_PR = cos_sin_PR
        self.q_a_norm_A = parameters.get(f"{name}.q_a_norm.weight")
        # What the layer's rows are multiplied with first: queries, or their latents, and the keys' latents.
        self.q_b: Linear | None = None if self.dims.q_lora_rank is None else parameters.linear(f"{name}.q_b")
        self.q_kv_a = _join(parameters, f"{name}.q" if self.q_b is None else f"{name}.q_a", f"{name}.kv_a")
        self.kv_a_norm_L = parameters[f"{name}.kv_a_norm.weight"]
        self.kv_b = parameters.linear(f"{name}.kv_b")
        self.o = parameters.linear(f"{name}.o")
        self.w_uk_HLn = self.w_uv_HVL = self.kv_b.weight_NK[:0]

    def finalize(self) -> None:
        """After loading: split kv_b, whose rows are [nope; v] per head. W_UV is a view, W_UK a transposed copy."""
        dims = self.dims
        w_HNL = self.kv_b.weight_NK.view(dims.num_heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank)
        self.w_uk_HLn = w_HNL[:, : dims.qk_nope_head_dim].transpose(1, 2).contiguous()
        self.w_uv_HVL = w_HNL[:, dims.qk_nope_head_dim :]

    def piece_queries(self, cache: LayerCache) -> int | None:
        """Queries of a piece in the list that prefill takes; None: it reads no list. What the cache is stored in does
        not matter: keys and values are those expanded from it. Asked with operands laid out as a step's, without rows.
        """
        dims, pages, weight_NK = self.dims, (0, cache.values.shape[1]), self.kv_b.weight_NK
        row = (self.q_b or self.q_kv_a).weight_NK.shape[0]
        q_THC = weight_NK.new_empty_strided((0, dims.num_heads, dims.qk_head_dim), (row, dims.qk_head_dim, 1))
        k_NPHn, v_NPHV = self._keys_and_values(weight_NK.new_empty(0, weight_NK.shape[0]), pages)
        return piece_queries(q_THC, k_NPHn, v_NPHV, None, weight_NK.new_empty(*pages, dims.qk_rope_head_dim))

    def decode_rule(self, cache: LayerCache) -> SplitRule | None:
        """By which the pieces of decode are listed; None: it reads no list. Asked as `piece_queries`."""
        if cache.scales is not None:
            return None
        dims, weight_NK, heads = self.dims, self.kv_b.weight_NK, (0, self.dims.num_heads)
        row = (self.q_b or self.q_kv_a).weight_NK.shape[0]
        q_pe_BHR = weight_NK.new_empty_strided((*heads, dims.qk_rope_head_dim), (row, dims.qk_head_dim, 1))
        return list_rule(weight_NK.new_empty(*heads, dims.kv_lora_rank), q_pe_BHR, cache.values)

    def __call__(self, x_TD: Tensor, plan: StepPlan, cache: LayerCache) -> Tensor:
        step, dims = plan.step, self.dims
        q_TX, kv_TX = self.q_kv_a(x_TD).tensor_split((-dims.kv_lora_rank - dims.qk_rope_head_dim,), dim=1)
        q_THC = self._queries(q_TX)
        q_pe_THR = q_THC[..., dims.qk_nope_head_dim :]
        rope = Rope(step.positions_T, self.cos_sin_PR, self.interleaved)
        stored = (kv_TX, self.kv_a_norm_L, LATENT_NORM_EPS, rope, cache.values, step.slot_mapping_T, cache.scales)
        given: dict[str, Any] = {
            "given": cache.quantization == "fp8-layer",
            "saturated_1": cache.saturated_1,
        }
        if step.decode is not None and step.prefill is None:
            q_latent_THL = absorb_rope_store(q_THC, self.w_uk_HLn, *stored, **given)
            out_THV = self._decode(q_latent_THL, q_pe_THR, cache, step.decode, plan.decode_pieces)
            return self.o(out_THV.view(-1, dims.num_heads * dims.v_head_dim))
        latent_rope_store(q_pe_THR, *stored, **given)
        out_THV = q_THC.new_empty(0, dims.num_heads, dims.v_head_dim)
        if step.decode is not None:
            rows = slice(step.num_decode)
            q_latent_BHL = head_linear(q_THC[rows, :, : dims.qk_nope_head_dim], self.w_uk_HLn)
            out_THV = self._decode(q_latent_BHL, q_pe_THR[rows], cache, step.decode, plan.decode_pieces)
        out_THV = self._prefill(out_THV, q_THC[step.num_decode :], cache, plan.mla_rounds)
        return self.o(out_THV.view(-1, dims.num_heads * dims.v_head_dim))

    def _queries(self, q_TX: Tensor) -> Tensor:
        """q_THC, [nope; rope] per head, not rotated yet; of queries or their latents. May be a strided view."""
        if self.q_b is not None and self.q_a_norm_A is not None:
            q_TX = self.q_b(rmsnorm(q_TX, self.q_a_norm_A, LATENT_NORM_EPS))
        return q_TX.unflatten(1, (self.dims.num_heads, self.dims.qk_head_dim))

    def _decode(
        self, q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache: LayerCache, decode: DecodeBatch, pieces: PieceList | None
    ) -> Tensor:
        operands = (q_latent_BHL, q_pe_BHR, cache.values, decode.block_tables_BM, decode.kv_lens_B)
        bounds: dict[str, Any] = {"scale": self.scale, "max_kv_len": decode.max_kv_len}
        return mla_decode_values(*operands, self.w_uv_HVL, **bounds, scales_NP2=cache.scales, pieces=pieces)

    def _prefill(self, first_BHV: Tensor, q_THC: Tensor, cache: LayerCache, rounds: tuple[MLARound, ...]) -> Tensor:
        """`first_BHV`, the step's decoding rows, and the result behind them.

        Round 0 covers every row; later rounds cover those whose sequence has keys there.
        """
        num_first, (num_rows, num_heads, _) = first_BHV.shape[0], q_THC.shape
        if len(rounds) == 1:
            whole_THV = with_rows_behind(first_BHV, num_first + num_rows)
            attention_prefill(q_THC, **self._expand(q_THC.dtype, cache, rounds[0]), out_THV=whole_THV[num_first:])
            return whole_THV
        out_THV = torch.empty(num_rows, num_heads, self.dims.v_head_dim, dtype=torch.float32, device=q_THC.device)
        lse_TH = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q_THC.device)
        for part in rounds:
            rows = slice(part.row_start, part.row_stop)
            result = attention_prefill(q_THC[rows], **self._expand(q_THC.dtype, cache, part), return_lse=True)
            if part.index > 0:
                result = merge_attention(out_THV[rows], lse_TH[rows], *result)
            out_THV[rows], lse_TH[rows] = result
        whole_THV = with_rows_behind(first_BHV, num_first + num_rows)
        whole_THV[num_first:] = out_THV
        return whole_THV

    def _expand(self, dtype: torch.dtype, cache: LayerCache, part: MLARound) -> dict[str, Any]:
        """What attention takes beside the queries: the keys and values of one round, expanded, as a cache of pages of
        the same size. No head has a rotary key of its own, so that part of the keys stays as it was gathered."""
        dims, pages = self.dims, (-1, cache.values.shape[1])
        latent_RL, k_pe_RR = gather_paged(
            cache.values,
            part.block_tables_BM,
            part.kv_starts_B,
            part.row_starts_B1,
            num_rows=part.num_rows,
            latent=dims.kv_lora_rank,
            scaling=None if cache.scales is None else LatentScaling(cache.scales, dtype),
        )
        k_NPHn, v_NPHV = self._keys_and_values(self.kv_b(latent_RL), pages)
        return {
            "k_cache_NPGC": k_NPHn,
            "v_cache_NPGV": v_NPHV,
            "k_rest_NPR": k_pe_RR.unflatten(0, pages),
            "block_tables_BM": part.workspace_tables_BM,
            "query_starts_B1": part.query_starts_B1,
            "query_offsets_B": part.query_offsets_B,
            "kv_lens_B": part.kv_lens_B,
            "kv_starts_B": part.kv_starts_B,
            "scale": self.scale,
            "max_query_len": part.max_query_len,
            "max_kv_len": part.max_kv_len,
            "pieces_I": part.pieces_I,
        }

    def _keys_and_values(self, kv_RX: Tensor, pages: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """(k_NPHn, v_NPHV), views of expanded rows as `pages`: their number, or -1, and the rows of each."""
        dims = self.dims
        widths = (dims.qk_nope_head_dim, dims.v_head_dim)
        k_NPHn, v_NPHV = kv_RX.unflatten(1, (dims.num_heads, sum(widths))).unflatten(0, pages).split(widths, dim=3)
        return k_NPHn, v_NPHV
