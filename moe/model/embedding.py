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
        # The runner asserts the range of ids that come from the host. This is for ids that it has not seen, such as the
        # sampler's -1 for a row of NaN: any row will do for them, an index out of range would end the process.
        return F.embedding(token_ids_T.clamp(0, self.weight_VD.shape[0] - 1), self.weight_VD)


class Head:
    """weight_VD; logits in fp32, never rounded to the model dtype, through the unsplit product."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, x_BD: Tensor) -> Tensor:
        return linear(x_BD, self.weight_VD, out_dtype=torch.float32)
