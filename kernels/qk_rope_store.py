"""What the queries, keys and values of a step go through before attention, in one launch: norm, rotation, cache.

    q, k = rotate(norm(q)), rotate(norm(k)); k and v go to the paged cache

Knows heads, positions and slots; knows nothing of layers. It is defined by the kernels it stands for (rmsnorm.py,
rope.py, kv_store.py): same operations, same roundings to the model dtype between them, same tiles, so the same bits.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.kv_quantize import KVScales, check_kv_scales, row_codes, row_scale, store_rows_reference
from kernels.kv_store import kv_store_reference
from kernels.rmsnorm import norm_tile, rms_apply, rms_scale, rmsnorm_reference
from kernels.rope import rope_reference_, rotate


class Rope(NamedTuple):
    """Where the rows stand, and by which angles a position is turned."""

    positions_T: Tensor
    """int64 [T], 0 <= position < P."""
    cos_sin_PR: Tensor
    """fp32 [P, R], contiguous: R/2 cosines, then R/2 sines. The first R entries of a head are turned."""
    interleaved: bool
    """Pairs lie side by side (2i, 2i + 1), else half apart (i, i + R/2)."""


class HeadNorms(NamedTuple):
    """Weights of the norms over each query head and each key head."""

    q_C: Tensor
    k_C: Tensor
    eps: float


def qk_rope_store(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """The queries, normalised and rotated, [T, H, C]; the keys likewise and the values go to slot_mapping_T (int64).

    q, k and v may be strided views; they are not changed. A slot of -1 writes nothing. With `scales` the caches are
    e4m3: rows become codes, and each row's scale is written unless it is given. `qk_rope_store_reference` is the
    definition.
    """
    run = qk_rope_store_triton if uses_triton(q_THC) else qk_rope_store_reference
    return run(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)


@triton.jit
def load_pairs(row_ptr, used, ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """Both entries of each pair [ROWS, BLOCK_P] of the rows at row_ptr [ROWS, 1], read as they lie in memory."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.load(row_ptr + c, mask=used & (c < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(x, (ROWS, BLOCK_P, 2)))
    else:
        c = tl.arange(0, BLOCK_P)[None, :]
        first = tl.load(row_ptr + c, mask=used & (c < HALF), other=0.0)
        second = tl.load(row_ptr + HALF + c, mask=used & (c < HALF), other=0.0)
    return first, second


@triton.jit
def store_pairs(
    row_ptr,
    first,
    second,
    used,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The way back of `load_pairs`."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.reshape(tl.join(first, second), (ROWS, 2 * BLOCK_P))
        tl.store(row_ptr + c, x, mask=used & (c < 2 * HALF))
    else:
        c = tl.arange(0, BLOCK_P)[None, :]
        tl.store(row_ptr + c, first, mask=used & (c < HALF))
        tl.store(row_ptr + HALF + c, second, mask=used & (c < HALF))


@triton.jit
def angles_of(table_ptr, position, HALF: tl.constexpr, BLOCK_P: tl.constexpr):
    """Cosines and sines of a position (or of a column of them), fp32 [.., BLOCK_P]."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    angle_ptr = table_ptr + position * (2 * HALF) + pair
    return tl.load(angle_ptr, mask=pair < HALF, other=0.0), tl.load(angle_ptr + HALF, mask=pair < HALF, other=0.0)


# The rows of BLOCK_H heads, from row_ptr [BLOCK_H, 1] to out_ptr [BLOCK_H, 1]: normalised, the first 2 * HALF entries
# turned, the others copied. scale_ptr [BLOCK_H, 1] or None: out_ptr takes codes, and their scales lie there.


@triton.jit
def _turn_heads(
    row_ptr,
    out_ptr,
    scale_ptr,
    weight_ptr,
    table_ptr,
    position,
    used,
    stored,
    eps,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GIVEN: tl.constexpr,
):
    scale = 1.0
    c = tl.arange(0, BLOCK_C)[None, :]
    if weight_ptr is not None:
        scale = rms_scale(tl.load(row_ptr + c, mask=used & (c < WIDTH), other=0.0), WIDTH, eps)
    # Read again, from the L1 cache, as pairs.
    first, second = load_pairs(row_ptr, used, BLOCK_H, HALF, INTERLEAVED, BLOCK_P)  # pyright: ignore
    if weight_ptr is not None:
        first_weight, second_weight = load_pairs(weight_ptr, True, 1, HALF, INTERLEAVED, BLOCK_P)
        first, second = rms_apply(first, scale, first_weight), rms_apply(second, scale, second_weight)
    cos, sin = angles_of(table_ptr, position, HALF, BLOCK_P)
    first, second = rotate(first, second, cos, sin)
    in_rest = (c >= 2 * HALF) & (c < WIDTH)
    if WIDTH > 2 * HALF:
        rest = tl.load(row_ptr + c, mask=used & in_rest, other=0.0)
        if weight_ptr is not None:
            rest = rms_apply(rest, scale, tl.load(weight_ptr + c, mask=in_rest, other=0.0))
    if scale_ptr is not None:
        # The scale is that of the rows as a cache in the model dtype would hold them.
        if GIVEN:
            row_scales = tl.load(scale_ptr, mask=stored, other=1.0)
        else:
            largest = tl.max(tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))), axis=1)
            if WIDTH > 2 * HALF:
                largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), axis=1))
            row_scales = row_scale(largest)[:, None]
            tl.store(scale_ptr, row_scales, mask=stored)
        first, second = row_codes(first, row_scales, out_ptr), row_codes(second, row_scales, out_ptr)
        if WIDTH > 2 * HALF:
            rest = row_codes(rest, row_scales, out_ptr)
    store_pairs(out_ptr, first, second, stored, BLOCK_H, HALF, INTERLEAVED, BLOCK_P)
    if WIDTH > 2 * HALF:
        tl.store(out_ptr + c, rest, mask=stored & in_rest)


# out[t, h] = turn(norm(q[t, h])); k_cache[slot // P, slot % P, g] = turn(norm(k[t, g])); v_cache[..., g] = v[t, g]
#   q_ptr [T, H, C], k_ptr, v_ptr [T, G, C] and the caches [N, P, G, C], one dtype, any strides but the last;
#   q_weight_ptr, k_weight_ptr [C] or None; out_ptr [T, H, C] contiguous; positions_ptr, slots_ptr int64 [T];
#   table_ptr fp32 [P, 2 * HALF]; k_scale_ptr, v_scale_ptr None, or fp32 [N, P, G] of caches in e4m3: read where GIVEN,
#   else written
#   grid (T, cdiv(H, BLOCK_H) + 2 * cdiv(G, BLOCK_H)): a program owns BLOCK_H heads of one token: of q, then of k, then
#   of v. fp32 statistics and rotation, a cast after each. Heads and columns beyond the last are masked; slot -1 writes
#   nothing.


@triton.jit
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
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GIVEN: tl.constexpr,
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
        _turn_heads(
            row_ptr, out_row_ptr, None, q_weight_ptr, table_ptr, position, used, used, eps,
            WIDTH, HALF, INTERLEAVED, BLOCK_H, BLOCK_C, BLOCK_P, GIVEN,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        page, offset = slot // page_size, slot % page_size
        if block < q_programs + k_programs:
            head = ((block - q_programs) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
            used = head < num_kv_heads
            row_ptr = k_ptr + token * stride_kt + head * stride_kg
            place_ptr = k_cache_ptr + page * stride_kcn + offset * stride_kcp + head * stride_kcg
            scale_ptr = k_scale_ptr
            if k_scale_ptr is not None:
                scale_ptr = k_scale_ptr + page * stride_sn + offset * stride_sp + head * stride_sg
            position = tl.load(positions_ptr + token)
            _turn_heads(
                row_ptr, place_ptr, scale_ptr, k_weight_ptr, table_ptr, position, used, used & (slot >= 0), eps,
                WIDTH, HALF, INTERLEAVED, BLOCK_H, BLOCK_C, BLOCK_P, GIVEN,
            )  # fmt: skip
        else:
            head = ((block - q_programs - k_programs) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
            c = tl.arange(0, BLOCK_C)[None, :]
            used_values = (head < num_kv_heads) & (c < WIDTH)
            v = tl.load(v_ptr + token * stride_vt + head * stride_vg + c, mask=used_values, other=0.0)
            place_ptr = v_cache_ptr + page * stride_vcn + offset * stride_vcp + head * stride_vcg
            if v_scale_ptr is not None:
                scale_ptrs = v_scale_ptr + page * stride_sn + offset * stride_sp + head * stride_sg
                stored = (head < num_kv_heads) & (slot >= 0)
                if GIVEN:
                    scale = tl.load(scale_ptrs, mask=stored, other=1.0)
                else:
                    scale = row_scale(tl.max(tl.abs(v.to(tl.float32)), axis=1))[:, None]
                    tl.store(scale_ptrs, scale, mask=stored)
                v = row_codes(v, scale, place_ptr)
            tl.store(place_ptr + c, v, mask=used_values & (slot >= 0))


def qk_rope_store_triton(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    """`qk_rope_store` as one launch."""
    _check_heads(q_THC, k_TGC, v_TGC, norms, rope, k_cache_NPGC, v_cache_NPGC, slot_mapping_T, scales)
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
    block_h, block_c, num_warps = norm_tile(width)
    q_C, k_C, eps = norms or (None, None, 0.0)
    k_NPG, v_NPG, given = scales or (None, None, False)
    _qk_rope_store_kernel[(num_tokens, cdiv(num_heads, block_h) + 2 * cdiv(num_kv_heads, block_h))](
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
        rope.positions_T,
        slot_mapping_T,
        rope.cos_sin_PR,
        eps,
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
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        BLOCK_P=next_power_of_2(half),
        GIVEN=given,
        num_warps=num_warps,
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
    scales: KVScales | None,
) -> None:
    """Few comparisons of tuples: this runs before every launch of a layer, and the device waits for it."""
    (num_tokens, _, width), num_kv_heads = q_THC.shape, k_TGC.shape[1]
    rows, pages = (num_tokens, num_kv_heads, width), (k_cache_NPGC.shape[1], num_kv_heads, width)
    shapes = (k_TGC.shape, v_TGC.shape, k_cache_NPGC.shape[1:], v_cache_NPGC.shape[1:])
    assert shapes == (rows, rows, pages, pages), f"shapes of k, v and caches do not fit queries {q_THC.shape}: {shapes}"
    last = (q_THC.stride(-1), k_TGC.stride(-1), v_TGC.stride(-1), k_cache_NPGC.stride(-1), v_cache_NPGC.stride(-1))
    assert last == (1, 1, 1, 1, 1) or num_tokens == 0, f"a head must lie together in memory; strides {last}"
    caches = () if scales else (k_cache_NPGC, v_cache_NPGC)
    dtypes = {x.dtype for x in (q_THC, k_TGC, v_TGC, *caches, *(norms[:2] if norms else ()))}
    assert len(dtypes) == 1, f"queries, keys, values, caches and norms share one dtype, not {dtypes}"
    if scales is not None:
        check_kv_scales(k_cache_NPGC, v_cache_NPGC, scales, q_THC.dtype)
    if norms is not None:
        assert norms.q_C.shape == norms.k_C.shape == (width,), f"norms of {norms.q_C.shape}, {norms.k_C.shape}"
    check_rope(rope, num_tokens, width, slot_mapping_T)


def check_rope(rope: Rope, num_tokens: int, width: int, slot_mapping_T: Tensor) -> None:
    """Positions, slots and the table fit rows of this number and width."""
    rows = (rope.positions_T.shape, slot_mapping_T.shape, rope.positions_T.dtype, slot_mapping_T.dtype)
    assert rows == ((num_tokens,), (num_tokens,), torch.int64, torch.int64), f"positions and slots are {rows}"
    table = rope.cos_sin_PR
    assert table.dtype == torch.float32 and table.is_contiguous(), "the table of angles is fp32 and contiguous"
    assert table.shape[1] % 2 == 0 and 0 < table.shape[1] <= width, f"cannot turn {table.shape[1]} of {width} entries"


def qk_rope_store_reference(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    slot_mapping_T: Tensor,
    scales: KVScales | None = None,
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
    else:
        for x_TGC, cache_NPGC, scales_NPG in zip((k_TGC, v_TGC), (k_cache_NPGC, v_cache_NPGC), scales[:2]):
            store_rows_reference(x_TGC, cache_NPGC, scales_NPG, slot_mapping_T, given=scales.given)
    return q_THC
