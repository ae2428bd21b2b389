"""int4 for rows of the KV cache: each half of a head has a step and a middle of its own, four bits an entry.

    value = (code - 8) * step + middle,   0 <= code <= 15
    step = (largest - least) / 15, middle = least + 8 * step, both rounded to bfloat16 before the codes are made

Knows rows, halves and bits; knows neither pages nor layers. Byte c of a row holds column c in its low four bits and
column c + C / 2 in its high ones, so that the bytes of a row are two tiles of codes, lower half and upper half. Codes
less 8 are whole numbers that every dtype of a model holds, so the products run on codes, and step and middle go into
scores and weights. A row's bits depend on that row alone. A half with a NaN or an infinity is NaN as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_shape

LEAST_STEP = tl.constexpr(0x0080)
"""The bits of the smallest step, 2^-126: a row of equal entries needs none, and its codes must be numbers."""

NOT_NUMBERS = tl.constexpr(0x7FC07FC0)
"""A NaN as step and as middle."""

INT4_UNIT = tl.constexpr(4.0)
"""What a value's step is multiplied with before it meets the weights in a 16-bit dtype, and the sum divided by in the
end. In float16 no weight then passes 65504, whatever the row, and small ones lose no bit."""


class Int4Scales(NamedTuple):
    """Of keys and values, bfloat16, views of any strides but the last, the same for both. The last dimension holds step
    and middle of the lower half, then of the upper one."""

    k_NPG4: Tensor
    v_NPG4: Tensor

    def words(self) -> tuple[Tensor, Tensor]:
        """[N, P, G, 2] as kernels read them: a half's step in the low 16 bits, its middle in the high ones."""
        return self.k_NPG4.view(torch.int32), self.v_NPG4.view(torch.int32)


@triton.jit
def bf16_bits(x):
    """Rounded to nearest even, as an integer; x is finite."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def step_and_middle(word):
    """Both in fp32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def half_codes(x, inside):
    """(codes int32 [X, B], words int32 [X, 1]) of halves x [X, B]; columns not `inside` do not count."""
    wide = x.to(tl.float32)
    least = tl.min(tl.where(inside, wide, float("inf")), axis=1)[:, None]
    spread = tl.max(tl.where(inside, wide, float("-inf")), axis=1)[:, None] - least
    lost = tl.max((inside & ~(tl.abs(wide) < float("inf"))).to(tl.int32), axis=1)[:, None] > 0
    lost |= ~(spread < float("inf"))
    spread, least = tl.where(lost, 1.0, spread), tl.where(lost, 0.0, least)
    step_bits = tl.maximum(bf16_bits(tl.div_rn(spread, 15.0)), LEAST_STEP)
    step, _ = step_and_middle(step_bits)
    middle_bits = bf16_bits(least + 8.0 * step)
    _, middle = step_and_middle(middle_bits << 16)
    code = tl.floor(tl.div_rn(tl.where(inside & ~lost, wide, middle) - middle, step) + 0.5) + 8.0
    code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
    return code, tl.where(lost, NOT_NUMBERS, step_bits | (middle_bits << 16))


@triton.jit
def both_codes(packed, dtype: tl.constexpr):
    """(lower half, upper half) of bytes, less 8, in `dtype`."""
    lower = ((packed & 15).to(tl.int8) - 8).to(dtype)
    return lower, ((packed >> 4).to(tl.int8) - 8).to(dtype)


def check_int4_caches(k_cache_NPGc: Tensor, v_cache_NPGc: Tensor, scales: Int4Scales) -> None:
    """Bytes of C / 2 columns, and four numbers for each row."""
    for cache, of_rows in zip((k_cache_NPGc, v_cache_NPGc), scales):
        assert_dtype("an int4 cache", cache, torch.uint8)
        assert_dtype("scales of an int4 cache", of_rows, torch.bfloat16)
        assert_shape("scales of an int4 cache", of_rows, (*cache.shape[:3], 4))
        assert of_rows.stride(-1) == 1 and all(stride % 2 == 0 for stride in of_rows.stride()[:3]), "pairs lie together"
    assert scales.k_NPG4.stride() == scales.v_NPG4.stride(), "scales of keys and values lie alike"


def store_int4_reference(x_TXC: Tensor, cache_NPXc: Tensor, scales_NPX4: Tensor, slot_mapping_T: Tensor) -> None:
    """cache[slot], scales[slot] = codes and scales of row t, each X by itself; a slot of -1 writes nothing."""
    written_T = slot_mapping_T >= 0
    slots_T, page_size = slot_mapping_T[written_T], cache_NPXc.shape[1]
    place = (slots_T // page_size, slots_T % page_size)
    x_TX2c = x_TXC[written_T].float().unflatten(-1, (2, -1))
    least_TX2 = x_TX2c.amin(-1)
    spread_TX2 = x_TX2c.amax(-1) - least_TX2
    step_TX2 = (spread_TX2 / torch.full_like(spread_TX2, 15.0)).bfloat16().clamp_min(2.0**-126)
    middle_TX2 = (least_TX2 + 8.0 * step_TX2.float()).bfloat16()
    found_TX2c = (x_TX2c - middle_TX2.float()[..., None]) / step_TX2.float()[..., None]
    codes_TX2c = ((found_TX2c + 0.5).floor() + 8.0).nan_to_num(nan=8.0).clamp(0.0, 15.0).to(torch.uint8)
    lost_TX2 = ~(x_TX2c.isfinite().all(-1) & spread_TX2.isfinite())
    scales_TX22 = torch.stack((step_TX2, middle_TX2), -1).masked_fill(lost_TX2[..., None], torch.nan)
    codes_TX2c.masked_fill_(lost_TX2[..., None], 8)
    cache_NPXc[place] = codes_TX2c[..., 0, :] | (codes_TX2c[..., 1, :] << 4)
    scales_NPX4[place] = scales_TX22.flatten(-2)


def int4_numbers(packed: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., C] of bytes [..., C / 2] and their scales [..., 4]: the numbers that a cache in int4 stands for."""
    codes = torch.stack((packed & 15, packed >> 4), -2).float() - 8.0
    step_and_middle_22 = scales.float().unflatten(-1, (2, 2))
    return (codes * step_and_middle_22[..., :1] + step_and_middle_22[..., 1:]).flatten(-2)
