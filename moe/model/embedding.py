"""Token ids to rows and rows to logits: the two ends of the network, which may share one matrix. Knows no layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.embed import embed_norm
from kernels.linear import linear
from kernels.rmsnorm import Norm
from moe.model.linear import TRIED_ROWS, Product, product_of_rows, rows_that_differ


class Embedding:
    """weight_VD; one row for each token id."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, token_ids_T: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """(rows normalised for the first layer, rows)."""
        return embed_norm(token_ids_T, self.weight_VD, norm)


class Head:
    """weight_VD; logits in fp32, never rounded to the model dtype, through the unsplit product or, once
    `choose_product` was asked, from some number of rows on through the library's, where that has the same bits."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD
        self.product: Product = _unsplit

    def __call__(self, x_BD: Tensor) -> Tensor:
        return self.product(x_BD, self.weight_VD, None)

    def choose_product(self) -> str:
        """Try it on its device; says which product serves which numbers of rows."""
        words = "unsplit"
        if self.weight_VD.is_cuda and self.weight_VD.dtype != torch.float32:
            differing = rows_that_differ(self.weight_VD, None, _unsplit, _library, HEAD_ROWS)
            words, self.product = product_of_rows(differing, _unsplit, _library)
        return words


# A step has not many more rows of logits, and more would take gigabytes to try.
HEAD_ROWS = tuple(rows for rows in TRIED_ROWS if rows <= 1024)


def _unsplit(x_BD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return linear(x_BD, weight_VD, bias_V, out_dtype=torch.float32)


def _library(x_BD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    assert bias_V is None, "a head has no bias"
    return torch.mm(x_BD, weight_VD.t(), out_dtype=torch.float32)
