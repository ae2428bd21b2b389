"""`kernels/qk_rope_store.py` over a cache in int4: norm, rotation and codes in one launch.

Knows heads, positions and slots; knows nothing of layers. A row becomes codes half by half (kv_int4.py), wherever a
half's columns lie in the pairs that are turned. `qk_rope_store_reference` is the definition.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_int4 import Int4Scales, half_codes
from kernels.rmsnorm import norm_tile, rms_scale
from kernels.turn_heads import HeadNorms, Rope, turn_heads, turn_of_columns, turned_columns

# out[t, h] = turn(norm(q[t, h])); k_cache[slot // P, slot % P, g] = codes of turn(norm(k[t, g])); v_cache[..., g] of v
#   q_ptr [T, H, C], k_ptr, v_ptr [T, G, C], one dtype, any strides but the last; q_weight_ptr, k_weight_ptr [C] or
#   None; out_ptr [T, H, C] contiguous; caches uint8 [N, P, G, C / 2]; k_words_ptr, v_words_ptr int32 [N, P, G, 2];
#   positions_ptr, slots_ptr int64 [T]; table_ptr fp32 [P, 2 * HALF]
#   grid (T, cdiv(H, BLOCK_H) + 2 * cdiv(G, BLOCK_H)): a program owns BLOCK_H heads of one token: of q, then of k, then
#   of v. fp32 statistics and rotation, a cast after each. Heads and columns beyond the last are masked; slot -1 writes
#   nothing.


@triton.jit
def _qk_rope_store_int4_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_words_ptr,
    v_words_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    eps,
    num_heads,
    num_kv_heads,
    page_size,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_cn,
    stride_cp,
    stride_cg,
    stride_wn,
    stride_wp,
    stride_wg,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    q_programs, k_programs = tl.cdiv(num_heads, BLOCK_H), tl.cdiv(num_kv_heads, BLOCK_H)
    block = tl.program_id(1)
    if block < q_programs:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        used = head < num_heads
        row_ptr = q_ptr + token * stride_qt + head * stride_qh
        out_row_ptr = out_ptr + (token * num_heads + head) * WIDTH
        position = tl.load(positions_ptr + token)
        turn_heads(
            row_ptr, out_row_ptr, None, None, q_weight_ptr, table_ptr, position, used, used, eps,
            WIDTH, HALF, INTERLEAVED, BLOCK_H, BLOCK_C, BLOCK_P, False,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        page, offset = slot // page_size, slot % page_size
        is_value = block >= q_programs + k_programs
        first_block = tl.where(is_value, q_programs + k_programs, q_programs)
        head = ((block - first_block) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        used = head < num_kv_heads
        stored = used & (slot >= 0)
        place = page * stride_cn + offset * stride_cp + head * stride_cg
        word_place = page * stride_wn + offset * stride_wp + head * stride_wg
        c = tl.arange(0, BLOCK_HALF)[None, :]
        inside = c < WIDTH // 2
        if is_value:
            row_ptr = v_ptr + token * stride_vt + head * stride_vg
            lower = tl.load(row_ptr + c, mask=used & inside, other=0.0)
            upper = tl.load(row_ptr + WIDTH // 2 + c, mask=used & inside, other=0.0)
            place_ptr, word_ptr = v_cache_ptr + place, v_words_ptr + word_place
        else:
            row_ptr = k_ptr + token * stride_kt + head * stride_kg
            scale = 1.0
            if k_weight_ptr is not None:
                column = tl.arange(0, BLOCK_C)[None, :]
                scale = rms_scale(tl.load(row_ptr + column, mask=used & (column < WIDTH), other=0.0), WIDTH, eps)
            position = tl.load(positions_ptr + token)
            NORMED: tl.constexpr = k_weight_ptr is not None
            turn = turn_of_columns(c, k_weight_ptr, table_ptr, position, WIDTH, HALF, INTERLEAVED)
            lower = turned_columns(row_ptr, c, used, scale, turn, WIDTH, HALF, INTERLEAVED, NORMED)
            c_upper = WIDTH // 2 + c
            turn = turn_of_columns(c_upper, k_weight_ptr, table_ptr, position, WIDTH, HALF, INTERLEAVED)
            upper = turned_columns(row_ptr, c_upper, used, scale, turn, WIDTH, HALF, INTERLEAVED, NORMED)
            place_ptr, word_ptr = k_cache_ptr + place, k_words_ptr + word_place
        lower_codes, lower_word = half_codes(lower, inside)
        upper_codes, upper_word = half_codes(upper, inside)
        tl.store(place_ptr + c, (lower_codes | (upper_codes << 4)).to(tl.uint8), mask=stored & inside)
        tl.store(word_ptr, lower_word, mask=stored)
        tl.store(word_ptr + 1, upper_word, mask=stored)


def qk_rope_store_int4(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGc: Tensor,
    v_cache_NPGc: Tensor,
    slot_mapping_T: Tensor,
    scales: Int4Scales,
) -> Tensor:
    """`qk_rope_store` as one launch; operands are checked there."""
    num_tokens, num_heads, width = q_THC.shape
    num_kv_heads, half = k_TGC.shape[1], rope.cos_sin_PR.shape[1] // 2
    assert k_cache_NPGc.stride() == v_cache_NPGc.stride(), "keys and values lie alike"
    out_THC = q_THC.new_empty(num_tokens, num_heads, width)
    if num_tokens == 0:
        return out_THC
    block_h, block_c, num_warps = norm_tile(width)
    q_C, k_C, eps = norms or (None, None, 0.0)
    k_words_NPG2, v_words_NPG2 = scales.words()
    _qk_rope_store_int4_kernel[(num_tokens, cdiv(num_heads, block_h) + 2 * cdiv(num_kv_heads, block_h))](
        q_THC,
        k_TGC,
        v_TGC,
        q_C,
        k_C,
        out_THC,
        k_cache_NPGc,
        v_cache_NPGc,
        k_words_NPG2,
        v_words_NPG2,
        rope.positions_T,
        slot_mapping_T,
        rope.cos_sin_PR,
        eps,
        num_heads,
        num_kv_heads,
        k_cache_NPGc.shape[1],
        *q_THC.stride()[:2],
        *k_TGC.stride()[:2],
        *v_TGC.stride()[:2],
        *k_cache_NPGc.stride()[:3],
        *k_words_NPG2.stride()[:3],
        WIDTH=width,
        HALF=half,
        INTERLEAVED=rope.interleaved,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        BLOCK_P=next_power_of_2(half),
        BLOCK_HALF=next_power_of_2(width // 2),
        num_warps=num_warps,
        **dependent_launch(q_THC),
    )
    return out_THC
