"""fp8 (e4m3) for rows of the KV cache: the scale of a row, its codes, and the way back.

Knows rows and scales; knows neither pages nor layers. value = code * scale. Either each row has its own scale, largest
magnitude / 448 in fp32, which is written beside it; or a scale is given beforehand, and what lies beyond 448 times it
becomes the largest value there is, and is counted. A row's codes depend on that row alone. NaN stays NaN, a row of
zeros stays zeros. An infinity never becomes a number: under a given scale its code is NaN; else the row's codes are NaN
or 0 and its scale is infinite, so that every product with them is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_shape
from kernels.quantize import FP8, FP8_MAX, TINIEST, fp8_scale, to_fp8

_TINIEST = tl.constexpr(TINIEST)

UNIT = tl.constexpr(256.0)
"""What a value's scale is multiplied with before it meets the weights in a 16-bit dtype, and the sum divided by in the
end. A power of two, so no bit changes, except that in float16 a scale stays above the smallest numbers: 256 * scale is
about the row's largest value."""


class KVScales(NamedTuple):
    """Scales of the keys and the values of a cache, fp32, views of any strides, the same for both.

    `given`: one scale for all rows, laid down beforehand (the views repeat it); else each row's own, which the store
    writes. `saturated_1`, int64 [1]: the store adds the number of entries that lay beyond a given scale.
    """

    k_NPG: Tensor
    v_NPG: Tensor
    given: bool = False
    saturated_1: Tensor | None = None


@triton.jit
def row_scale(largest):
    """The scale of rows with these largest magnitudes."""
    return tl.div_rn(tl.where(largest > _TINIEST, largest, _TINIEST), 448.0)


@triton.jit
def row_codes(x, scale, code_ptr):
    """Rows in the dtype behind `code_ptr`; the cast stops at the largest e4m3."""
    return (x.to(tl.float32) * tl.div_rn(1.0, scale)).to(code_ptr.dtype.element_ty)


@triton.jit
def given_codes(x, scale, stored, code_ptr, saturated_ptr):
    """Rows under a scale laid down beforehand. A sum of integers: in whatever order programs add theirs, it is one."""
    wide = x.to(tl.float32)
    scaled = wide * tl.div_rn(1.0, scale)
    beyond = tl.sum((stored & (tl.abs(scaled) > 448.0)).to(tl.int32))
    if saturated_ptr is not None:
        tl.atomic_add(saturated_ptr, beyond.to(tl.int64), mask=beyond > 0, sem="relaxed")
    clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return tl.where(tl.abs(wide) < float("inf"), clamped, float("nan")).to(code_ptr.dtype.element_ty)


def check_scales(values: Tensor, scales: Tensor | None, shape: tuple[int, ...], model_dtype: torch.dtype) -> None:
    """A cache without scales has the model's dtype; one with them is e4m3, a scale for each row of `shape`."""
    if scales is None:
        assert_dtype("a cache without scales", values, model_dtype)
        return
    assert_dtype("a cache with scales", values, FP8)
    assert_shape("scales", scales, shape)
    assert_dtype("scales", scales, torch.float32)


def check_kv_scales(k_cache_NPGC: Tensor, v_cache_NPGV: Tensor, scales: KVScales | None, dtype: torch.dtype) -> None:
    """`check_scales` of keys and values."""
    for cache, of_rows in zip((k_cache_NPGC, v_cache_NPGV), scales[:2] if scales else (None, None)):
        check_scales(cache, of_rows, tuple(cache.shape[:3]), dtype)
    assert scales is None or scales.k_NPG.stride() == scales.v_NPG.stride(), "scales of keys and values lie alike"


def store_rows_reference(
    x_TXC: Tensor,
    cache_NPXC: Tensor,
    scales_NPX: Tensor,
    slot_mapping_T: Tensor,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> None:
    """cache[slot] = codes of row t, for each X its own scale, which goes to scales[slot] unless it is given."""
    written_T = slot_mapping_T >= 0
    slots_T, page_size = slot_mapping_T[written_T], cache_NPXC.shape[1]
    place = (slots_T // page_size, slots_T % page_size)
    x_TXC = x_TXC[written_T].float()
    if given:
        scales_TX = scales_NPX[place]
        if saturated_1 is not None:
            saturated_1 += (x_TXC * (1.0 / scales_TX)[..., None]).abs().gt(FP8_MAX).sum()
        x_TXC = x_TXC.where(x_TXC.isfinite(), torch.nan)
    else:
        scales_TX = fp8_scale(x_TXC.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1))
        scales_NPX[place] = scales_TX
    cache_NPXC[place] = to_fp8(x_TXC, scales_TX[..., None])
