"""Matrix products with a parameter, and which implementation each shape uses. Knows nothing of layers.

A row's bits must not depend on how many rows are multiplied with it. On a GPU the vendor library keeps to that except
where it splits K for some numbers of rows, all of them small; where it does not split, its bits are those of the
unsplit kernel. So each shape is tried once after loading, for a list of numbers of rows: from the number on where both
agree the library multiplies, below it the unsplit kernel, which is the faster one there anyway. On the CPU the unsplit
product (blocks of 32 rows) is always used: there the library's rows change with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import uses_triton
from kernels.linear import linear_reference, linear_triton

# Where a library changes its mind: powers of two, their neighbours, and odd sizes between them.
TRIED_ROWS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 160),
    *(192, 200, 255, 256, 257, 320, 384, 400, 511, 512, 513, 640, 777, 896, 1000, 1023, 1024, 2000, 4096),
)


FEW_ROWS = 64
"""To here the time goes into reading the weight. Measured on an H200 at 1 to 64 rows, weights read from memory: unsplit
0.9 to 1.1 of the library's time where that does not split K, a half to a tenth where it does; and the unsplit kernel is
placed, and asks for its weights, while the kernel before it still runs."""

MANY_ROWS = 1024
"""A library that still splits K for so many rows is not used at all."""


def forbid_split_k() -> None:
    """Tell torch's vendor library to sum bf16 and fp16 products in fp32 and over the whole of K. Process-wide.

    Only cuBLASLt can be forbidden to split K, so torch is told to prefer it.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # pyright: ignore
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)  # pyright: ignore


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x_MK, weight_NK, bias_N or None) -> y_MN"""


class Linear:
    """y = x W^T + b. `product` is the unsplit one of its device until `Parameters.choose_products` is asked."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self.product: Product = linear_triton if uses_triton(weight_NK) else linear_reference

    def __call__(self, x_MK: Tensor) -> Tensor:
        return self.product(x_MK, self.weight_NK, self.bias_N)


class Parameters:
    """All parameters of one network by our name, and the linears made of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.linears: dict[str, Linear] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def linear(self, name: str) -> Linear:
        """The product with `name.weight` and, where there is one, `name.bias`; the same object for the same name."""
        if name not in self.linears:
            self.linears[name] = Linear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
        return self.linears[name]

    def choose_products(self) -> dict[str, str]:
        """Try each distinct shape once on its device; returns shape -> which product serves which numbers of rows."""
        chosen: dict[tuple[int, int, bool], tuple[str, Product]] = {}
        for linear in self.linears.values():
            num_outputs, num_inputs = linear.weight_NK.shape
            shape = (num_outputs, num_inputs, linear.bias_N is not None)
            if shape not in chosen:
                chosen[shape] = ("unsplit", linear.product)
                if linear.weight_NK.is_cuda:
                    chosen[shape] = product_of_rows(rows_that_differ(linear.weight_NK, linear.bias_N), linear.product)
            linear.product = chosen[shape][1]
        return {f"[{n}, {k}]{' + bias' if bias else ''}": words for (n, k, bias), (words, _) in chosen.items()}


def library_product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The vendor library's, in the dtype of the operands."""
    return F.linear(x_MK, weight_NK, bias_N)


def rows_that_differ(
    weight_NK: Tensor,
    bias_N: Tensor | None,
    unsplit: Product = linear_triton,
    library: Product = library_product,
    tried: Sequence[int] = TRIED_ROWS,
) -> list[int]:
    """The numbers of rows in `tried` for which the library's bits are not those of the unsplit product."""
    generator = torch.Generator(device=weight_NK.device).manual_seed(0)
    sizes = (max(tried), weight_NK.shape[1])
    x_MK = torch.randn(sizes, generator=generator, dtype=torch.float32, device=weight_NK.device).to(weight_NK.dtype)
    whole_MN = unsplit(x_MK, weight_NK, bias_N)
    differs = torch.stack([(library(x_MK[:rows], weight_NK, bias_N) != whole_MN[:rows]).any() for rows in tried])
    return [rows for rows, one in zip(tried, differs.tolist()) if one]


def product_of_rows(
    differing: Sequence[int], unsplit: Product, library: Product = library_product
) -> tuple[str, Product]:
    """What serves a shape whose library product differs from the unsplit one at these numbers of rows, in words too.

    The library takes over above the last number of rows where it differs, if that is not so large that hardly a step
    would gain.
    """
    most = max((*differing, FEW_ROWS))
    if most >= MANY_ROWS:
        return "unsplit", unsplit

    def product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        return (unsplit if x_MK.shape[0] <= most else library)(x_MK, weight_NK, bias_N)

    return f"unsplit to {most} rows, library above", product
