"""What the queries, keys and values of a step go through before attention, in one launch: norm, rotation, cache.

    q, k = rotate(norm(q)), rotate(norm(k)); k and v go to the paged cache

Knows heads, positions and slots; knows nothing of layers. It is defined by the kernels it stands for (rmsnorm.py,
rope.py, kv_store.py): same operations, same roundings to the model dtype between them, same tiles, so the same bits.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_int4 import Int4Scales, check_int4_caches, store_int4_reference
from kernels.kv_quantize import KVScales, check_kv_scales, given_codes, row_codes, row_scale, store_rows_reference
from kernels.kv_store import kv_store_reference
from kernels.qk_rope_store_int4 import qk_rope_store_int4
from kernels.rmsnorm import norm_tile, rmsnorm_reference, tile_of_many
from kernels.rope import rope_reference_
from kernels.tiles import num_multiprocessors
from kernels.turn_heads import HeadNorms, Rope, check_rope, turn_heads


def qk_rope_store(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | Int4Scales | None = None,
) -> Tensor:
    """The queries, normalised and rotated, [T, H, C]; the keys likewise and the values go to slot_mapping_T (int64).

    q, k and v may be strided views; they are not changed. A slot of -1 writes nothing. With `scales` the caches are
    e4m3 or int4: rows become codes, and each row's scales are written unless they are given.
    `qk_rope_store_reference` is the definition.
    """
    run = qk_rope_store_triton if uses_triton(q_THC) else qk_rope_store_reference
    return run(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)


# out[t, h] = turn(norm(q[t, h])); k_cache[slot // P, slot % P, g] = turn(norm(k[t, g])); v_cache[..., g] = v[t, g]
#   q_ptr [T, H, C], k_ptr, v_ptr [T, G, C] and the caches [N, P, G, C], one dtype, any strides but the last;
#   q_weight_ptr, k_weight_ptr [C] or None; out_ptr [T, H, C] contiguous; positions_ptr, slots_ptr int64 [T];
#   table_ptr fp32 [P, 2 * HALF]; k_scale_ptr, v_scale_ptr None, or fp32 [N, P, G] of caches in e4m3: read where GIVEN,
#   else written; saturated_ptr int64 [1] or None: takes the number of entries beyond a given scale
#   grid (T * cdiv(H, BLOCK_H) + 2 * cdiv(T, TOKENS) * cdiv(G, BLOCK_G),): first programs of BLOCK_H query heads of one
#   token; then programs of BLOCK_G kv heads of each of TOKENS tokens, of keys, then of values. fp32 statistics and
#   rotation, a cast after each. Tokens, heads and columns beyond the last are masked; slot -1 writes nothing.


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens"])
def _qk_rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    saturated_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    eps,
    num_tokens,
    num_heads,
    num_kv_heads,
    page_size,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_kcn,
    stride_kcp,
    stride_kcg,
    stride_vcn,
    stride_vcp,
    stride_vcg,
    stride_sn,
    stride_sp,
    stride_sg,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    program = tl.program_id(0) - num_tokens * head_blocks
    if program < 0:
        token = (tl.program_id(0) // head_blocks).to(tl.int64)
        head = ((tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        used = head < num_heads
        row_ptr = q_ptr + token * stride_qt + head * stride_qh
        out_row_ptr = out_ptr + (token * num_heads + head) * WIDTH
        position = tl.load(positions_ptr + token)
        turn_heads(
            row_ptr, out_row_ptr, None, None, q_weight_ptr, table_ptr, position, used, used, eps,
            WIDTH, HALF, INTERLEAVED, BLOCK_H, BLOCK_C, BLOCK_P, GIVEN,
        )  # fmt: skip
    else:
        kv_blocks = tl.cdiv(num_kv_heads, BLOCK_G)
        k_programs = tl.cdiv(num_tokens, TOKENS) * kv_blocks
        of_keys = program < k_programs
        program = tl.where(of_keys, program, program - k_programs)
        row = tl.arange(0, TOKENS * BLOCK_G)[:, None]
        kv_head = (program % kv_blocks) * BLOCK_G + row % BLOCK_G
        kv_token = (program // kv_blocks).to(tl.int64)
        if TOKENS > 1:
            kv_token = kv_token * TOKENS + row // BLOCK_G
        in_batch = kv_token < num_tokens
        slot = tl.load(slots_ptr + kv_token, mask=in_batch, other=-1)
        page, offset = slot // page_size, slot % page_size
        used_kv = in_batch & (kv_head < num_kv_heads)
        stored = used_kv & (slot >= 0)
        if of_keys:
            kv_row_ptr = k_ptr + kv_token * stride_kt + kv_head * stride_kg
            place_ptr = k_cache_ptr + page * stride_kcn + offset * stride_kcp + kv_head * stride_kcg
            scale_ptr = k_scale_ptr
            if k_scale_ptr is not None:
                scale_ptr = k_scale_ptr + page * stride_sn + offset * stride_sp + kv_head * stride_sg
            kv_position = tl.load(positions_ptr + kv_token, mask=in_batch, other=0)
            turn_heads(
                kv_row_ptr, place_ptr, scale_ptr, saturated_ptr, k_weight_ptr, table_ptr, kv_position, used_kv, stored,
                eps, WIDTH, HALF, INTERLEAVED, TOKENS * BLOCK_G, BLOCK_C, BLOCK_P, GIVEN,
            )  # fmt: skip
        else:
            c = tl.arange(0, BLOCK_C)[None, :]
            v_row_ptr = v_ptr + kv_token * stride_vt + kv_head * stride_vg
            v = tl.load(v_row_ptr + c, mask=used_kv & (c < WIDTH), other=0.0)
            place_ptr = v_cache_ptr + page * stride_vcn + offset * stride_vcp + kv_head * stride_vcg
            if v_scale_ptr is not None:
                scale_ptrs = v_scale_ptr + page * stride_sn + offset * stride_sp + kv_head * stride_sg
                if GIVEN:
                    scale = tl.load(scale_ptrs, mask=stored, other=1.0)
                    v = given_codes(v, scale, stored, place_ptr, saturated_ptr)
                else:
                    scale = row_scale(tl.max(tl.abs(v.to(tl.float32)), axis=1))[:, None]
                    tl.store(scale_ptrs, scale, mask=stored)
                    v = row_codes(v, scale, place_ptr)
            tl.store(place_ptr + c, v, mask=stored & (c < WIDTH))


class HeadsTile(NamedTuple):
    """Query heads of a program; kv heads of a token, and tokens, of one that stores; warps."""

    block_h: int
    block_g: int
    tokens: int
    num_warps: int


def heads_tile(num_tokens: int, num_heads: int, num_kv_heads: int, width: int, multiprocessors: int) -> HeadsTile:
    """The tile for so many tokens; none changes a bit."""
    rows, _, num_warps = norm_tile(width)
    many, _, _ = tile_of_many(num_tokens * num_heads, width, multiprocessors)
    if many == rows:
        return HeadsTile(rows, rows, 1, num_warps)
    block_g = min(next_power_of_2(num_kv_heads), many)
    return HeadsTile(max(rows, min(next_power_of_2(num_heads), many)), block_g, many // block_g, num_warps)


def qk_rope_store_triton(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | Int4Scales | None = None,
) -> Tensor:
    """`qk_rope_store` as one launch."""
    _check_heads(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)
    if isinstance(scales, Int4Scales):
        return qk_rope_store_int4(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)
    return _launch(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)


def _launch(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None,
) -> Tensor:
    num_tokens, num_heads, width = q_THC.shape
    num_kv_heads, half = k_TGC.shape[1], rope.cos_sin_PR.shape[1] // 2
    out_THC = q_THC.new_empty(num_tokens, num_heads, width)
    if num_tokens == 0:
        return out_THC
    tile = heads_tile(num_tokens, num_heads, num_kv_heads, width, num_multiprocessors(q_THC.device))
    q_C, k_C, eps = norms or (None, None, 0.0)
    k_NPG, v_NPG, given, saturated_1 = scales or (None, None, False, None)
    kv_programs = cdiv(num_tokens, tile.tokens) * cdiv(num_kv_heads, tile.block_g)
    _qk_rope_store_kernel[(num_tokens * cdiv(num_heads, tile.block_h) + 2 * kv_programs,)](
        q_THC,
        k_TGC,
        v_TGC,
        q_C,
        k_C,
        out_THC,
        k_cache_NPGC,
        v_cache_NPGC,
        k_NPG,
        v_NPG,
        saturated_1,
        rope.positions_T,
        slot_mapping_T,
        rope.cos_sin_PR,
        eps,
        num_tokens,
        num_heads,
        num_kv_heads,
        k_cache_NPGC.shape[1],
        *q_THC.stride()[:2],
        *k_TGC.stride()[:2],
        *v_TGC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGC.stride()[:3],
        *((0, 0, 0) if k_NPG is None else k_NPG.stride()),
        WIDTH=width,
        HALF=half,
        INTERLEAVED=rope.interleaved,
        BLOCK_H=tile.block_h,
        BLOCK_G=tile.block_g,
        TOKENS=tile.tokens,
        BLOCK_C=next_power_of_2(width),
        BLOCK_P=next_power_of_2(half),
        GIVEN=given,
        num_warps=tile.num_warps,
        **dependent_launch(q_THC),
    )
    return out_THC


def _check_heads(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | Int4Scales | None,
) -> None:
    """Few comparisons of tuples: this runs before every launch of a layer, and the device waits for it."""
    (num_tokens, _, width), num_kv_heads = q_THC.shape, k_TGC.shape[1]
    stored_width = width // 2 if isinstance(scales, Int4Scales) else width
    rows, pages = (num_tokens, num_kv_heads, width), (k_cache_NPGC.shape[1], num_kv_heads, stored_width)
    shapes = (k_TGC.shape, v_TGC.shape, k_cache_NPGC.shape[1:], v_cache_NPGC.shape[1:])
    assert shapes == (rows, rows, pages, pages), f"shapes of k, v and caches do not fit queries {q_THC.shape}: {shapes}"
    last = (q_THC.stride(-1), k_TGC.stride(-1), v_TGC.stride(-1), k_cache_NPGC.stride(-1), v_cache_NPGC.stride(-1))
    assert last == (1, 1, 1, 1, 1) or num_tokens == 0, f"a head must lie together in memory; strides {last}"
    caches = () if scales else (k_cache_NPGC, v_cache_NPGC)
    dtypes = {x.dtype for x in (q_THC, k_TGC, v_TGC, *caches, *(norms[:2] if norms else ()))}
    assert len(dtypes) == 1, f"queries, keys, values, caches and norms share one dtype, not {dtypes}"
    if isinstance(scales, Int4Scales):
        check_int4_caches(k_cache_NPGC, v_cache_NPGC, scales)
    elif scales is not None:
        check_kv_scales(k_cache_NPGC, v_cache_NPGC, scales, q_THC.dtype)
    if norms is not None:
        assert norms.q_C.shape == norms.k_C.shape == (width,), f"norms of {norms.q_C.shape}, {norms.k_C.shape}"
    check_rope(rope, num_tokens, width, slot_mapping_T)


def qk_rope_store_reference(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | Int4Scales | None = None,
) -> Tensor:
    """The definition, and the CPU's product path: the references of norm, rotation and store, one after another."""
    _check_heads(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)
    if norms is None:
        q_THC, k_TGC = q_THC.clone(), k_TGC.clone()
    else:
        q_THC, k_TGC = (rmsnorm_reference(x, weight_C, norms.eps) for x, weight_C in zip((q_THC, k_TGC), norms[:2]))
    for x_THC in (q_THC, k_TGC):
        rope_reference_(x_THC, rope.positions_T, rope.cos_sin_PR, interleaved=rope.interleaved)
    if scales is None:
        kv_store_reference(k_TGC, v_TGC, k_cache_NPGC, v_cache_NPGC, slot_mapping_T)
        return q_THC
    for x_TGC, cache_NPGC, of_rows in zip((k_TGC, v_TGC), (k_cache_NPGC, v_cache_NPGC), scales[:2]):
        if isinstance(scales, Int4Scales):
            store_int4_reference(x_TGC, cache_NPGC, of_rows, slot_mapping_T)
        else:
            given = {"given": scales.given, "saturated_1": scales.saturated_1}
            store_rows_reference(x_TGC, cache_NPGC, of_rows, slot_mapping_T, **given)
    return q_THC
