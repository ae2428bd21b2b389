"""Token ids to rows and rows to logits: the two ends of the network, which may share one matrix. Knows no layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.embed import embed_norm
from kernels.linear import linear
from kernels.rmsnorm import Norm


class Embedding:
    """weight_VD; one row for each token id."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, token_ids_T: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """(rows normalised for the first layer, rows)."""
        return embed_norm(token_ids_T, self.weight_VD, norm)


class Head:
    """weight_VD; logits in fp32, never rounded to the model dtype, through the unsplit product."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, x_BD: Tensor) -> Tensor:
        return linear(x_BD, self.weight_VD, out_dtype=torch.float32)
