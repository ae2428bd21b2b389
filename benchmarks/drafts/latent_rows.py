"""What few rows go through before MLA's decode, with all they wait for asked at once (kernels/latent_rope_store.py).
Predicted: dsv2-lite -0.8 to -1.4 us a layer at one row (-20 to -38 us a step).

Today's chain of the program of latents, in sm_90 machine code, from the wait to the store: two 64-bit divisions by the
page size (80 instructions, which ptxas puts behind the wait, though slots are known before), the latent (a round of
L2), its norm, then only the norm's weights (a round of HBM: nobody has read them in this step), a change of layout over
two barriers, then only the rotary key (a round of L2), four barriers of its turn, its store: three rounds, nine
barriers. Here: the page size is known when it is compiled, weights stand ahead of the wait in the layout of the latent,
and the rotary key has a program of its own, where each thread reads its column and the other of its pair, as
attention's queries are turned: one round and two barriers in one, one round in the other. A round of HBM is 0.6 to 0.8
us, one of L2 0.3 to 0.6, divisions and barriers 0.2. The products beside it (one round, eight steps of HMMA, three
barriers) are then as long a chain, and nothing shorter is to be had in this launch.

Tiles and operations are the same, so the same bits.

To land it: into `_latent_rope_store_kernel` for all sizes (weights ahead of the wait, PAGE a constant, the rotary keys'
programs behind those of latents; e4m3 wants both of a row's scales, each in its own program); the head says who owns
what. Test: test_latent_rope_store.py and test_absorb_rope_store.py as they are.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.drafts.case import Case
from kernels import absorb_rope_store as in_use
from kernels import latent_rope_store as stores
from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.latent_rope_store import Absorbed, _absorb_tile
from kernels.rmsnorm import norm_tile, rms_apply, rms_scale
from kernels.rope import rotate
from kernels.turn_heads import Rope, angles_of, load_pairs, store_pairs, turn_of_columns, turned_columns
from launch.replay import rotation_length

_launch_latents = stores.launch_latents  # what it falls back to, also when installed

_MOST_ROWS = 8

# As kernels/latent_rope_store.py has it, with w_ptr, without scales.
#   grid (H * cdiv(T, 16) * cdiv(L, BLOCK_N) + 2 * cdiv(T, BLOCK_R) + T * cdiv(H, BLOCK_H),): first programs of one tile
#   of y each, then of BLOCK_R latents, then of BLOCK_R rotary keys, then of BLOCK_H query heads of a token.


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_rows_kernel(
    q_pe_ptr,
    kv_ptr,
    weight_ptr,
    cache_ptr,
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
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    tiles = tl.cdiv(num_tokens, 16) * tl.cdiv(LATENT, BLOCK_N)
    if program < tiles * num_heads:
        _absorb_tile(
            nope_ptr, w_ptr, y_ptr, program // tiles, program % tiles, num_tokens, num_heads, stride_nt, stride_nh,
            NOPE, LATENT, 16, BLOCK_N, BLOCK_K, PDL,
        )  # fmt: skip
        return
    program -= tiles * num_heads
    row_programs = tl.cdiv(num_tokens, BLOCK_R)
    if program < 2 * row_programs:
        row = ((program % row_programs).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
        in_batch = row < num_tokens
        slot = tl.load(slots_ptr + row, mask=in_batch, other=-1)
        row_ptr = kv_ptr + row * stride_kt
        place_ptr = cache_ptr + (slot // PAGE) * stride_cn + (slot % PAGE) * stride_cp
        if program < row_programs:
            column = tl.arange(0, BLOCK_L)[None, :]
            in_latent = column < LATENT
            # As a tile like that of the rows: so it comes in their layout.
            weight_ptrs = weight_ptr + tl.broadcast_to(column, (BLOCK_R, BLOCK_L))
            weight = tl.load(weight_ptrs, mask=in_latent, other=0.0)
            wait_for_inputs(PDL)  # slots, positions, angles and weights are older than the launch before
            x = tl.load(row_ptr + column, mask=in_batch & in_latent, other=0.0)
            latent = rms_apply(x, rms_scale(x, LATENT, eps), weight)
            tl.store(place_ptr + column, latent, mask=(slot >= 0) & in_latent)
        else:
            c = tl.arange(0, 2 * BLOCK_P)[None, :]
            position = tl.load(positions_ptr + row, mask=in_batch, other=0)
            turn = turn_of_columns(c, None, table_ptr, position, 2 * HALF, HALF, INTERLEAVED)
            wait_for_inputs(PDL)
            k = turned_columns(row_ptr + LATENT, c, in_batch, 1.0, turn, 2 * HALF, HALF, INTERLEAVED, False)
            tl.store(place_ptr + LATENT + c, k, mask=(slot >= 0) & (c < 2 * HALF))
    else:
        head_blocks = tl.cdiv(num_heads, BLOCK_H)
        program -= 2 * row_programs
        head = (program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        token = (program // head_blocks).to(tl.int64)
        used = head < num_heads
        head_cos, head_sin = angles_of(table_ptr, tl.load(positions_ptr + token), HALF, BLOCK_P)
        wait_for_inputs(PDL)
        head_ptr = q_pe_ptr + token * stride_qt + head.to(tl.int64) * stride_qh
        first, second = load_pairs(head_ptr, used, BLOCK_H, HALF, INTERLEAVED, BLOCK_P)
        first, second = rotate(first, second, head_cos, head_sin)
        # A small tile is held by several threads at once: all must have read before one writes.
        tl.debug_barrier()
        store_pairs(head_ptr, first, second, used, BLOCK_H, HALF, INTERLEAVED, BLOCK_P)


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
    """As in kernels/latent_rope_store.py."""
    stored = (q_pe_THR, kv_TX, norm_L, eps, rope, cache_NPX, slot_mapping_T)
    num_tokens, num_heads, rotated = q_pe_THR.shape
    if absorbed is None or scales_NP2 is not None or not 0 < num_tokens <= _MOST_ROWS:
        _launch_latents(*stored, scales_NP2, given, saturated_1, absorbed)
        return
    latent, nope = norm_L.shape[0], absorbed.w_HLn.shape[2]
    block_r, block_l, num_warps = norm_tile(latent)
    block_p, block_n = next_power_of_2(rotated // 2), 64
    block_h = min(next_power_of_2(num_heads), max(1, 1024 // block_p))
    programs = 2 * cdiv(num_tokens, block_r) + num_tokens * cdiv(num_heads, block_h)
    programs += cdiv(num_tokens, 16) * cdiv(latent, block_n) * num_heads
    _latent_rows_kernel[(programs,)](
        q_pe_THR,
        kv_TX,
        norm_L,
        cache_NPX,
        rope.positions_T,
        slot_mapping_T,
        rope.cos_sin_PR,
        eps,
        num_tokens,
        num_heads,
        *q_pe_THR.stride()[:2],
        kv_TX.stride(0),
        *cache_NPX.stride()[:2],
        *absorbed,
        *absorbed.x_THn.stride()[:2],
        PAGE=cache_NPX.shape[1],
        NOPE=nope,
        LATENT=latent,
        HALF=rotated // 2,
        INTERLEAVED=rope.interleaved,
        BLOCK_R=block_r,
        BLOCK_L=block_l,
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_K=max(16, next_power_of_2(nope)),
        num_warps=num_warps,
        **dependent_launch(kv_TX),
    )


def _stored(launch: Callable[..., None] | None, q_THC: Tensor, w_HLn: Tensor, *stored: Any) -> tuple[Tensor, ...]:
    """(latent queries, queries, cache) after `absorb_rope_store` with this launch; None: its reference."""
    if launch is None:
        return in_use.absorb_rope_store_reference(q_THC, w_HLn, *stored), q_THC, stored[4]
    q_nope_THn, q_pe_THR = in_use._check_absorbed(q_THC, w_HLn, stored[1])
    absorbed = Absorbed(q_nope_THn, w_HLn, q_THC.new_empty(*q_THC.shape[:2], w_HLn.shape[1]))
    launch(q_pe_THR, *stored, None, absorbed=absorbed)
    return absorbed.y_THL, q_THC, stored[4]


def cases(device: torch.device) -> Iterator[Case]:
    """dsv2-lite's one row and seven, of which some have no slot; halves apart in odd sizes; one row of 128 heads."""
    shapes = [
        ("dsv2-lite 1 row", 1, 16, 512, 64, 128, True),
        ("dsv2-lite 7 rows, two without a slot", 7, 16, 512, 64, 128, True),
        ("3 rows, 5 heads of odd sizes", 3, 5, 96, 24, 48, False),
        ("128 heads 1 row", 1, 128, 512, 64, 128, True),
    ]
    cuda = device.type == "cuda"
    runs = cuda or not isinstance(_latent_rows_kernel, triton.JITFunction)  # or is interpreted
    launches: dict[str, Callable[..., None] | None] = {
        "in use": _launch_latents if cuda else None,
        "at once": launch_latents if runs else None,
    }
    for name, *shape in shapes[: None if cuda else 3]:
        rotation = rotation_length(2 * shape[1] * shape[2] * shape[4], most=64) if cuda else 1
        # Queries and cache are written: each form has its own.
        forms = {
            form: [partial(_stored, launch, *_draw(*shape, device, seed)) for seed in range(rotation)]
            for form, launch in launches.items()
        }
        yield Case(name, forms, tolerance=0.0 if cuda else 1e-5)


def _draw(
    num_tokens: int, num_heads: int, latent: int, rotated: int, nope: int, interleaved: bool, device: torch.device,
    seed: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Queries, keys and latents are columns of one product; the cache is NaN; every third token has no slot."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    drawing = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawing, device=device).to(dtype)

    width, page = latent + rotated, 16
    rows_TX = draw(num_tokens, num_heads * (nope + rotated) + width)
    q_TX, kv_TX = rows_TX.tensor_split((-width,), dim=1)
    angle_PR = torch.rand(600, rotated // 2, generator=generator) * 6.28
    table_PR = torch.cat([angle_PR.cos(), angle_PR.sin()], dim=1).to(device)
    positions_T = torch.randint(0, 600, (num_tokens,), generator=generator).to(device)
    slots_T = torch.randperm(4 * page, generator=generator)[:num_tokens]
    slots_T[2::3] = -1
    cache_NPX = torch.full((4, page, width), torch.nan, dtype=dtype, device=device)
    rope = Rope(positions_T, table_PR, interleaved)
    q_THC = q_TX.unflatten(1, (num_heads, nope + rotated))
    return q_THC, draw(num_heads, latent, nope), kv_TX, draw(latent), 1e-6, rope, cache_NPX, slots_T.to(device)


def install() -> None:
    stores.launch_latents = in_use.launch_latents = launch_latents
