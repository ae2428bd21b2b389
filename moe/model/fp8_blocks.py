"""fp8 weights in blocks: weight = block * scale, in fp32. Knows one tensor and its scales.

A scale is a plain number (float32, bfloat16, float16), or one exponent byte (float8_e8m0fnu, uint8) that means
2^(byte - 127), as its dtype declares; the dtype alone decides which. "weight_scale_inv" multiplies, despite its name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import GROUP, QuantizedBlocks, quantize_blocks

PLAIN_SCALE_DTYPES = ("F32", "BF16", "F16")
EXPONENT_SCALE_DTYPES = ("F8_E8M0", "U8")
_EXPONENT_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., N, K]: [..., ceil(N / rows), ceil(K / columns)]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def scale_values(scale: Tensor, name: str) -> Tensor:
    """The scales as fp32 numbers; ValueError names the tensor if one is not finite and positive."""
    if scale.dtype in _EXPONENT_DTYPES:
        byte = scale.view(torch.uint8)
        values = torch.exp2(byte.to(torch.float64) - 127).to(torch.float32)
        values = torch.where(byte == 255, torch.nan, values)  # the format's NaN
    else:
        values = scale.to(torch.float32)
    bad = ~(values.isfinite() & (values > 0))
    if bad.any():
        raise ValueError(
            f"tensor {name}: {int(bad.sum())} of {bad.numel()} weight scales are not finite positive numbers "
            f"(the first is {float(values[bad][0])}); the checkpoint is damaged: fetch it again."
        )
    return values


def dequantize(weight_NK: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 [N, K]: each block of `block` elements times its scale; blocks at the lower and right edge may be smaller.

    `weight_NK` float8 [N, K]; `scale` fp32 [ceil(N / rows), ceil(K / columns)], on the same device.
    """
    N, K = weight_NK.shape
    assert tuple(scale.shape) == scale_grid((N, K), block), f"scales {tuple(scale.shape)} for weight {(N, K)}"
    rows_NB = scale.repeat_interleave(block[0], dim=0)[:N]
    return weight_NK.to(torch.float32).mul_(rows_NB.repeat_interleave(block[1], dim=1)[:, :K])


def expert_blocks(
    weight_ND: Tensor, scale: Tensor | None, block: tuple[int, int] | None, parts: int
) -> QuantizedBlocks:
    """An expert's matrix of `parts` equal parts as the kernels take it: values [N, D], scales [parts, M, G].

    `scale` None: a weight in a floating dtype, which is quantised. Stored blocks are taken as they are, unless they
    have another size or reach from one part into the next: then their numbers are quantised anew. ValueError for a
    weight that is not finite.
    """
    height = weight_ND.shape[0] // parts
    if scale is not None and block is not None:
        if block == (GROUP, GROUP) and (parts == 1 or height % GROUP == 0):
            return QuantizedBlocks(weight_ND, scale.unflatten(0, (parts, -1)))
        weight_ND = dequantize(weight_ND, scale, block)
    if not weight_ND.isfinite().all():
        raise ValueError("holds values that are not finite, which no fp8 block can; load it with quantization=none.")
    values, scales = quantize_blocks(weight_ND.unflatten(0, (parts, height)))
    return QuantizedBlocks(values.flatten(0, 1), scales)
