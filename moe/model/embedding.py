"""Token ids to rows and rows to logits: the two ends of the network, which may share one matrix. Knows no layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import linear


class Embedding:
    """weight_VD; one row for each token id."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        # A row whose logits were NaN is handed on as id -1 until the host has ended its request: any row will do for
        # it, but an index out of range would end the process.
        return F.embedding(token_ids_T.clamp(0, self.weight_VD.shape[0] - 1), self.weight_VD)


class Head:
    """weight_VD; logits in fp32, never rounded to the model dtype, through the unsplit product."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, x_BD: Tensor) -> Tensor:
        return linear(x_BD, self.weight_VD, out_dtype=torch.float32)
