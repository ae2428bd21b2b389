"""Two attentions over different keys made into one, by their log-sum-exp. Knows sums and weights; knows no keys.

out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b);   lse = ln(e^lse_a + e^lse_b)
"""
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_same_device, assert_shape, next_power_of_2, uses_triton


def merge_attention(out_a_THV: Tensor, lse_a_TH: Tensor, out_b_THV: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """(out_THV, lse_TH) over the keys of both parts, fp32. `merge_attention_reference` is the definition.

    A part with lse -inf is empty: its weight is exactly 0, what its `out` holds is not looked at, and the other part is
    returned bit for bit. Both empty: out 0, lse -inf. The four operands may have different strides.
    """
    merge = merge_attention_triton if uses_triton(out_a_THV) else merge_attention_reference
    return merge(out_a_THV, lse_a_TH, out_b_THV, lse_b_TH)


# out = (2^(a - max) out_a + 2^(b - max) out_b) / (2^(a - max) + 2^(b - max)) with a, b the parts' lse, here in base e
#   out_a_ptr, out_b_ptr fp32 [T, H, V], lse_a_ptr, lse_b_ptr fp32 [T, H], each with strides of its own;
#   out_ptr [T, H, V] and lse_ptr [T, H] fp32 contiguous
#   grid (T, H): a program owns one head of one token. Columns from V on are masked.


@triton.jit
def _merge_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_heads,
    stride_at,
    stride_ah,
    stride_av,
    stride_lat,
    stride_lah,
    stride_bt,
    stride_bh,
    stride_bv,
    stride_lbt,
    stride_lbh,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lse_a = tl.load(lse_a_ptr + token * stride_lat + head * stride_lah)
    lse_b = tl.load(lse_b_ptr + token * stride_lbt + head * stride_lbh)
    maximum = tl.maximum(lse_a, lse_b)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight_a, weight_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = weight_a + weight_b
    cv = tl.arange(0, BLOCK_V)
    in_width = cv < VALUE_WIDTH
    a_ptrs = out_a_ptr + token * stride_at + head * stride_ah + cv * stride_av
    b_ptrs = out_b_ptr + token * stride_bt + head * stride_bh + cv * stride_bv
    # What an empty part holds may be anything; 0 * NaN would be NaN.
    a = tl.where(weight_a == 0.0, 0.0, tl.load(a_ptrs, mask=in_width, other=0.0))
    b = tl.where(weight_b == 0.0, 0.0, tl.load(b_ptrs, mask=in_width, other=0.0))
    total = tl.where(total == 0.0, 1.0, total)
    out = (a * weight_a + b * weight_b) / total
    tl.store(out_ptr + (token * num_heads + head) * VALUE_WIDTH + cv, out, mask=in_width)
    tl.store(lse_ptr + token * num_heads + head, maximum + tl.log(total))


def merge_attention_triton(
    out_a_THV: Tensor, lse_a_TH: Tensor, out_b_THV: Tensor, lse_b_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge_attention` as one launch."""
    _check_merge(out_a_THV, lse_a_TH, out_b_THV, lse_b_TH)
    num_tokens, num_heads, value_width = out_a_THV.shape
    out_THV = torch.empty(out_a_THV.shape, dtype=torch.float32, device=out_a_THV.device)
    lse_TH = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=out_a_THV.device)
    if num_tokens == 0:
        return out_THV, lse_TH
    _merge_kernel[(num_tokens, num_heads)](
        out_a_THV,
        lse_a_TH,
        out_b_THV,
        lse_b_TH,
        out_THV,
        lse_TH,
        num_heads,
        *out_a_THV.stride(),
        *lse_a_TH.stride(),
        *out_b_THV.stride(),
        *lse_b_TH.stride(),
        VALUE_WIDTH=value_width,
        BLOCK_V=next_power_of_2(value_width),
        num_warps=1,
    )
    return out_THV, lse_TH


def _check_merge(out_a_THV: Tensor, lse_a_TH: Tensor, out_b_THV: Tensor, lse_b_TH: Tensor) -> None:
    assert_shape("lse_a_TH", lse_a_TH, tuple(out_a_THV.shape[:2]))
    assert_shape("out_b_THV", out_b_THV, tuple(out_a_THV.shape))
    assert_shape("lse_b_TH", lse_b_TH, tuple(out_a_THV.shape[:2]))
    operands = {"out_a_THV": out_a_THV, "lse_a_TH": lse_a_TH, "out_b_THV": out_b_THV, "lse_b_TH": lse_b_TH}
    for name, x in operands.items():
        assert_dtype(name, x, torch.float32)
    assert_same_device(**{"first": out_a_THV, **operands})


def merge_attention_reference(
    out_a_THV: Tensor, lse_a_TH: Tensor, out_b_THV: Tensor, lse_b_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, and the CPU's product path."""
    _check_merge(out_a_THV, lse_a_TH, out_b_THV, lse_b_TH)
    max_TH = torch.maximum(lse_a_TH, lse_b_TH)
    base_TH = max_TH.masked_fill(max_TH == float("-inf"), 0.0)
    weight_a_TH, weight_b_TH = (lse_a_TH - base_TH).exp(), (lse_b_TH - base_TH).exp()
    total_TH = weight_a_TH + weight_b_TH
    # What an empty part holds may be anything; 0 * NaN would be NaN.
    part_a_THV = (out_a_THV * weight_a_TH.unsqueeze(-1)).masked_fill((weight_a_TH == 0).unsqueeze(-1), 0.0)
    part_b_THV = (out_b_THV * weight_b_TH.unsqueeze(-1)).masked_fill((weight_b_TH == 0).unsqueeze(-1), 0.0)
    out_THV = (part_a_THV + part_b_THV) / total_TH.masked_fill(total_TH == 0, 1.0).unsqueeze(-1)
    return out_THV, max_TH + total_TH.log()
