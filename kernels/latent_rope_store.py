"""What the latents of a step (multi-head latent attention) go through before attention, in one launch.

    c = norm(c); k_pe, q_pe = rotate(k_pe), rotate(q_pe); (c, k_pe) goes to the paged cache

In a step of decode rows alone the queries' way into the latent space goes with it (absorb_rope_store.py).

Knows latents, positions and slots; knows nothing of layers. It is defined by the kernels it stands for (rmsnorm.py,
rope.py, kv_store.py, linear.py): same operations, same roundings to the model dtype between them, same tiles, so the
same bits, where rows begin at multiples of 16 entries. Others Triton spreads over threads by all that a kernel reads
and writes.
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
from kernels.kv_quantize import check_scales, given_codes, row_codes, row_scale, store_rows_reference
from kernels.kv_store import latent_store_reference
from kernels.rmsnorm import norm_tile, rms_apply, rms_scale, rmsnorm_reference, tile_of_many
from kernels.rope import rope_reference_, rotate
from kernels.row_tiles import multiply
from kernels.tiles import num_multiprocessors
from kernels.turn_heads import Rope, angles_of, check_rope, load_pairs, store_pairs, turn_of_columns, turned_columns


def latent_rope_store(
    q_pe_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None = None,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> None:
    """Rotates q_pe in place; row t of kv, X = L + R, goes to its slot: L entries normalised, R rotated.

    q_pe may be a strided view; kv is not changed. A slot of -1 writes nothing. Where the cache is e4m3, scales_NP2 fp32
    takes a row's scales, the latent's and the rotary key's; `given`: it holds them, the same for all rows, and
    saturated_1 int64 counts the entries beyond. `latent_rope_store_reference` is the definition.
    """
    run = latent_rope_store_triton if uses_triton(kv_TX) else latent_rope_store_reference
    given_scales = {"given": given, "saturated_1": saturated_1}
    run(q_pe_THR, kv_TX, norm_L, eps, rope, cache_NPX, slot_mapping_T, scales_NP2, **given_scales)


class Absorbed(NamedTuple):
    """y[t, h] = w[h] x[t, h], beside the rest."""

    x_THn: Tensor
    w_HLn: Tensor
    y_THL: Tensor


# cache[slot // PAGE, slot % PAGE] = (norm(kv[t, :L]), turn(kv[t, L:])); q_pe[t, h] = turn(q_pe[t, h]) in place
#   q_pe_ptr [T, H, R], T and H strided; kv_ptr [T, L + R], rows strided; weight_ptr [L]; cache_ptr [N, PAGE, L + R];
#   one dtype; positions_ptr, slots_ptr int64 [T]; table_ptr fp32 [P, 2 * HALF], R = 2 * HALF; scales_ptr None, or fp32
#   [N, PAGE, 2] of a cache in e4m3: each part's largest magnitude / 448, or GIVEN; saturated_ptr int64 [1] or None:
#   takes the number of entries beyond a given scale
#   w_ptr [H, L, NOPE] or None; else y_ptr [T, H, L]: y[t, h] = w[h] nope[t, h], nope_ptr [T, H, NOPE], T and H strided
#   grid (H * cdiv(T, BLOCK_M) * cdiv(L, BLOCK_N) if w_ptr + 2 * cdiv(T, BLOCK_R) + cdiv(T, TOKENS) * cdiv(H, BLOCK_H)):
#   first programs of one tile of y each, then of BLOCK_R latents, then of BLOCK_R rotary keys, then of BLOCK_H query
#   heads of each of TOKENS tokens. fp32 statistics, rotation and sums, one cast each. What lies beyond the last is
#   masked.
# Behind the launch before, none waits for memory twice: pages are constants, weights come ahead, and rotary keys have
# programs of their own, where each thread reads its column and the other of its pair. One H200, microseconds, with
# norm, weights and keys one after another / so: dsv2-lite 1 row 2.43 / 2.19, 7 rows, two without a slot, 2.76 / 2.19;
# 3 rows, 5 heads of odd sizes, 2.70 / 1.19; 128 heads 1 row 6.40 / 6.46. dsv2-lite's step of one row 1.815 / 1.802 ms.


@triton.jit
def _absorb_tile(
    nope_ptr,
    w_ptr,
    y_ptr,
    head,
    tile,
    num_tokens,
    num_heads,
    stride_nt,
    stride_nh,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M tokens' queries of one head times BLOCK_N rows of its weights, whose columns are one step of the sum."""
    column_tiles = tl.cdiv(LATENT, BLOCK_N)
    m = (tile // column_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n, k = (tile % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (head.to(tl.int64) * LATENT + n) * NOPE + k[:, None]
    w = tl.load(w_ptrs, mask=(n < LATENT) & (k < NOPE)[:, None], other=0.0)  # weights: nothing of this step
    wait_for_inputs(PDL)
    x_ptrs = nope_ptr + m * stride_nt + head.to(tl.int64) * stride_nh + k[None, :]
    x = tl.load(x_ptrs, mask=(m < num_tokens) & (k < NOPE)[None, :], other=0.0)
    y = multiply(x, w, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), False)
    y_ptrs = y_ptr + (m * num_heads + head) * LATENT + n
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < num_tokens) & (n < LATENT))


@triton.jit
def _store_part(x, row_ptr, column, scale_ptr, stored, in_row, saturated_ptr, GIVEN: tl.constexpr):
    """A part of each row, x [rows, columns], to row_ptr [rows, 1]: as codes where there is a scale_ptr [rows, 1]."""
    if scale_ptr is not None:
        if GIVEN:
            x = given_codes(x, tl.load(scale_ptr, mask=stored, other=1.0), stored, row_ptr, saturated_ptr)
        else:
            scale = row_scale(tl.max(tl.abs(x.to(tl.float32)), axis=1))[:, None]
            tl.store(scale_ptr, scale, mask=stored)
            x = row_codes(x, scale, row_ptr)
    tl.store(row_ptr + column, x, mask=stored & in_row)


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_rope_store_kernel(
    q_pe_ptr,
    kv_ptr,
    weight_ptr,
    cache_ptr,
    scales_ptr,
    saturated_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    eps,
    num_tokens,
    num_heads,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_cn,
    stride_cp,
    stride_sn,
    stride_sp,
    nope_ptr,
    w_ptr,
    y_ptr,
    stride_nt,
    stride_nh,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if w_ptr is not None:
        tiles = tl.cdiv(num_tokens, BLOCK_M) * tl.cdiv(LATENT, BLOCK_N)
        if program < tiles * num_heads:
            _absorb_tile(
                nope_ptr, w_ptr, y_ptr, program // tiles, program % tiles, num_tokens, num_heads, stride_nt, stride_nh,
                NOPE, LATENT, BLOCK_M, BLOCK_N, BLOCK_K, PDL,
            )  # fmt: skip
            return
        program -= tiles * num_heads
    row_programs = tl.cdiv(num_tokens, BLOCK_R)
    if program < 2 * row_programs:
        row = ((program % row_programs).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
        in_batch = row < num_tokens
        slot = tl.load(slots_ptr + row, mask=in_batch, other=-1)
        stored = slot >= 0
        row_ptr = kv_ptr + row * stride_kt
        place_ptr = cache_ptr + (slot // PAGE) * stride_cn + (slot % PAGE) * stride_cp
        latent_scale_ptr, rope_scale_ptr = None, None
        if scales_ptr is not None:
            latent_scale_ptr = scales_ptr + (slot // PAGE) * stride_sn + (slot % PAGE) * stride_sp
            rope_scale_ptr = latent_scale_ptr + 1
        # Slots, positions, angles and weights are older than the launch before.
        if program < row_programs:
            column = tl.arange(0, BLOCK_L)[None, :]
            in_latent = column < LATENT
            # A tile like that of the rows: so it comes in their layout.
            weight_ptrs = weight_ptr + tl.broadcast_to(column, (BLOCK_R, BLOCK_L))
            weight = tl.load(weight_ptrs, mask=in_latent, other=0.0)
            wait_for_inputs(PDL)
            x = tl.load(row_ptr + column, mask=in_batch & in_latent, other=0.0)
            latent = rms_apply(x, rms_scale(x, LATENT, eps), weight)
            _store_part(latent, place_ptr, column, latent_scale_ptr, stored, in_latent, saturated_ptr, GIVEN)
        else:
            c = tl.arange(0, 2 * BLOCK_P)[None, :]
            position = tl.load(positions_ptr + row, mask=in_batch, other=0)
            turn = turn_of_columns(c, None, table_ptr, position, 2 * HALF, HALF, INTERLEAVED)
            wait_for_inputs(PDL)
            k = turned_columns(row_ptr + LATENT, c, in_batch, 1.0, turn, 2 * HALF, HALF, INTERLEAVED, False)
            _store_part(k, place_ptr + LATENT, c, rope_scale_ptr, stored, c < 2 * HALF, saturated_ptr, GIVEN)
    else:
        head_blocks = tl.cdiv(num_heads, BLOCK_H)
        program -= 2 * row_programs
        query = tl.arange(0, TOKENS * BLOCK_H)[:, None]
        head = (program % head_blocks) * BLOCK_H + query % BLOCK_H
        token = (program // head_blocks).to(tl.int64)
        if TOKENS > 1:
            token = token * TOKENS + query // BLOCK_H
        used = (token < num_tokens) & (head < num_heads)
        position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0)
        head_cos, head_sin = angles_of(table_ptr, position, HALF, BLOCK_P)
        wait_for_inputs(PDL)
        head_ptr = q_pe_ptr + token * stride_qt + head.to(tl.int64) * stride_qh
        first, second = load_pairs(head_ptr, used, TOKENS * BLOCK_H, HALF, INTERLEAVED, BLOCK_P)
        first, second = rotate(first, second, head_cos, head_sin)
        # A small tile is held by several threads at once: all must have read before one writes.
        tl.debug_barrier()
        store_pairs(head_ptr, first, second, used, TOKENS * BLOCK_H, HALF, INTERLEAVED, BLOCK_P)


def latent_rope_store_triton(
    q_pe_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None = None,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> None:
    """`latent_rope_store` as one launch."""
    check_latents(q_pe_THR, kv_TX, norm_L, rope, cache_NPX, slot_mapping_T, scales_NP2)
    launch_latents(q_pe_THR, kv_TX, norm_L, eps, rope, cache_NPX, slot_mapping_T, scales_NP2, given, saturated_1)


def launch_latents(
    q_pe_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None,
    given: bool = False,
    saturated_1: Tensor | None = None,
    absorbed: Absorbed | None = None,
) -> None:
    """The launch; with `absorbed` its y_THL is filled too. Operands are checked already."""
    num_tokens, num_heads, rotated = q_pe_THR.shape
    if num_tokens == 0:
        return
    latent = norm_L.shape[0]
    block_r, block_l, num_warps = tile_of_many(num_tokens, latent, num_multiprocessors(kv_TX.device))
    block_p = next_power_of_2(rotated // 2)
    block_h = min(next_power_of_2(num_heads), max(1, 1024 // block_p))
    tokens = block_r // norm_tile(latent)[0]
    programs = 2 * cdiv(num_tokens, block_r) + cdiv(num_tokens, tokens) * cdiv(num_heads, block_h)
    nope, block_m, block_n = 0, 16, 64
    if absorbed is not None:
        nope = absorbed.w_HLn.shape[2]
        block_m = 64 if num_tokens > 16 and kv_TX.element_size() == 2 else 16
        programs += cdiv(num_tokens, block_m) * cdiv(latent, block_n) * num_heads
    _latent_rope_store_kernel[(programs,)](
        q_pe_THR,
        kv_TX,
        norm_L,
        cache_NPX,
        scales_NP2,
        saturated_1,
        rope.positions_T,
        slot_mapping_T,
        rope.cos_sin_PR,
        eps,
        num_tokens,
        num_heads,
        *q_pe_THR.stride()[:2],
        kv_TX.stride(0),
        *cache_NPX.stride()[:2],
        *((0, 0) if scales_NP2 is None else scales_NP2.stride()[:2]),
        *((None, None, None, 0, 0) if absorbed is None else (*absorbed, *absorbed.x_THn.stride()[:2])),
        PAGE=cache_NPX.shape[1],
        NOPE=nope,
        LATENT=latent,
        HALF=rotated // 2,
        INTERLEAVED=rope.interleaved,
        BLOCK_R=block_r,
        BLOCK_L=block_l,
        BLOCK_H=block_h,
        TOKENS=tokens,
        BLOCK_P=block_p,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=max(16, next_power_of_2(nope)),
        GIVEN=given,
        num_warps=num_warps,
        **dependent_launch(kv_TX),
    )


def check_latents(
    q_pe_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None,
) -> None:
    """Shapes, dtypes and strides that the kernel relies on."""
    num_tokens, _, rotated = q_pe_THR.shape
    width = norm_L.shape[0] + rotated
    shapes = (kv_TX.shape, cache_NPX.shape[2])
    assert shapes == ((num_tokens, width), width), f"kv rows and cache rows {shapes} are not L + R = {width} wide"
    last = (q_pe_THR.stride(-1), kv_TX.stride(-1), cache_NPX.stride(-1))
    assert last == (1, 1, 1) or num_tokens == 0, f"a row must lie together in memory; strides {last}"
    dtypes = {x.dtype for x in (q_pe_THR, kv_TX, norm_L, *(() if scales_NP2 is not None else (cache_NPX,)))}
    assert len(dtypes) == 1, f"queries, latents, norm and cache share one dtype, not {dtypes}"
    check_scales(cache_NPX, scales_NP2, (*cache_NPX.shape[:2], 2), q_pe_THR.dtype)
    assert rope.cos_sin_PR.shape[1] == rotated, f"the table turns {rope.cos_sin_PR.shape[1]} entries, not {rotated}"
    check_rope(rope, num_tokens, rotated, slot_mapping_T)


def latent_rope_store_reference(
    q_pe_THR: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None = None,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> None:
    """The definition, and the CPU's product path: the references of norm, rotation and store, one after another."""
    check_latents(q_pe_THR, kv_TX, norm_L, rope, cache_NPX, slot_mapping_T, scales_NP2)
    latent = norm_L.shape[0]
    latent_TL, k_pe_TR = rmsnorm_reference(kv_TX[:, :latent], norm_L, eps), kv_TX[:, latent:].clone()
    for x_THR in (q_pe_THR, k_pe_TR[:, None]):
        rope_reference_(x_THR, rope.positions_T, rope.cos_sin_PR, interleaved=rope.interleaved)
    if scales_NP2 is None:
        latent_store_reference(latent_TL, k_pe_TR, cache_NPX, slot_mapping_T)
        return
    parts = (
        (latent_TL, cache_NPX[..., :latent], scales_NP2[..., :1]),
        (k_pe_TR, cache_NPX[..., latent:], scales_NP2[..., 1:]),
    )
    for x_TC, cache_NPC, scales_NP1 in parts:
        rows = (x_TC[:, None], cache_NPC.unsqueeze(2), scales_NP1, slot_mapping_T)
        store_rows_reference(*rows, given=given, saturated_1=saturated_1)
