"""The weighted sum of a token's expert rows, in routing order.

Knows rows and weights; knows neither experts nor ranks. The order k = 0..K-1 is the router's, never the placement's, so the
sum has the same bits wherever the experts live.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import assert_dtype, assert_last_contiguous, assert_same_device, assert_shape


def combine(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """out_TD[t] = sum over k of weights_TK[t, k] * y_RD[packed_row_TK[t, k]], in y's dtype. `combine_reference` defines it.

    packed_row_TK int32, -1 adds nothing (not even a NaN weight); weights_TK fp32. The sum is fp32, k ascending, one cast.
    """
    return combine_reference(y_RD, packed_row_TK, weights_TK)


def _check_operands(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> None:
    assert_shape("y_RD", y_RD, (None, None))
    assert_last_contiguous("y_RD", y_RD)
    assert_shape("packed_row_TK", packed_row_TK, (None, None))
    assert_dtype("packed_row_TK", packed_row_TK, torch.int32)
    assert_shape("weights_TK", weights_TK, tuple(packed_row_TK.shape))
    assert_dtype("weights_TK", weights_TK, torch.float32)
    assert_same_device(y_RD, packed_row_TK=packed_row_TK, weights_TK=weights_TK)


def combine_reference(y_RD: Tensor, packed_row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The definition of the combine, in plain torch."""
    _check_operands(y_RD, packed_row_TK, weights_TK)
    num_tokens, top_k = packed_row_TK.shape
    sum_TD = torch.zeros(num_tokens, y_RD.shape[1], dtype=torch.float32, device=y_RD.device)
    if y_RD.shape[0] == 0:
        return sum_TD.to(y_RD.dtype)
    for k in range(top_k):
        row_T = packed_row_TK[:, k].long()
        term_TD = weights_TK[:, k : k + 1] * y_RD[row_T.clamp_min(0)].float()
        sum_TD += term_TD.masked_fill((row_T < 0).unsqueeze(1), 0.0)
    return sum_TD.to(y_RD.dtype)
