"""From token ids to the first rows of a network, and to the same rows normalised, in one launch.

Knows ids, a table and a norm; knows no layers. An id outside the table reads its nearest row: ids that the host has not
seen, such as the sampler's -1 for a row of NaN, must not end the process, and any row will do for them.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.checks import assert_last_contiguous, cdiv, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.rmsnorm import Norm, norm_tile, rms_apply, rms_scale, rmsnorm_reference


def embed_norm(token_ids_T: Tensor, weight_VD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """(normalised rows, rows) of the table, [T, D] each; ids int64. `embed_norm_reference` is the definition."""
    return (embed_norm_triton if uses_triton(weight_VD) else embed_norm_reference)(token_ids_T, weight_VD, norm)


# rows[t] = weight[min(max(ids[t], 0), V - 1)]; out[t] = norm(rows[t])
#   ids_ptr int64 [T]; weight_ptr [V, D], rows strided; norm_ptr [D]; rows_ptr, out_ptr [T, D] contiguous
#   grid (cdiv(T, BLOCK_R),): a program owns BLOCK_R rows, in the tile of rmsnorm.py; the rest is masked


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens"])
def _embed_norm_kernel(
    ids_ptr,
    weight_ptr,
    norm_ptr,
    rows_ptr,
    out_ptr,
    num_tokens,
    num_ids,
    num_columns,
    stride_v,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    used = (token < num_tokens) & (d < num_columns)
    id = tl.load(ids_ptr + token, mask=token < num_tokens, other=0)
    id = tl.minimum(tl.maximum(id, 0), num_ids - 1)
    x = tl.load(weight_ptr + id * stride_v + d, mask=used, other=0.0)
    norm = tl.load(norm_ptr + d, mask=d < num_columns, other=0.0)
    tl.store(rows_ptr + token * num_columns + d, x, mask=used)
    tl.store(out_ptr + token * num_columns + d, rms_apply(x, rms_scale(x, num_columns, eps), norm), mask=used)


def embed_norm_triton(token_ids_T: Tensor, weight_VD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """`embed_norm` as one launch."""
    _check_operands(token_ids_T, weight_VD, norm)
    num_tokens, (num_ids, num_columns) = token_ids_T.shape[0], weight_VD.shape
    rows_TD, out_TD = weight_VD.new_empty(num_tokens, num_columns), weight_VD.new_empty(num_tokens, num_columns)
    if num_tokens == 0:
        return out_TD, rows_TD
    block_r, block_d, num_warps = norm_tile(num_columns)
    _embed_norm_kernel[(cdiv(num_tokens, block_r),)](
        token_ids_T,
        weight_VD,
        norm.weight_C,
        rows_TD,
        out_TD,
        num_tokens,
        num_ids,
        num_columns,
        weight_VD.stride(0),
        norm.eps,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=num_warps,
        **dependent_launch(weight_VD),
    )
    return out_TD, rows_TD


def _check_operands(token_ids_T: Tensor, weight_VD: Tensor, norm: Norm) -> None:
    assert weight_VD.dim() == 2 and token_ids_T.dim() == 1, f"ids {token_ids_T.shape}, table {weight_VD.shape}"
    given = (token_ids_T.dtype, token_ids_T.device, norm.weight_C.shape, norm.weight_C.dtype)
    wanted = (torch.int64, weight_VD.device, weight_VD.shape[1:], weight_VD.dtype)
    assert given == wanted, f"ids and norm are {given}, wanted {wanted}"
    assert_last_contiguous("weight_VD", weight_VD)


def embed_norm_reference(token_ids_T: Tensor, weight_VD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The definition, and the CPU's product path."""
    _check_operands(token_ids_T, weight_VD, norm)
    rows_TD = functional.embedding(token_ids_T.clamp(0, weight_VD.shape[0] - 1), weight_VD)
    return rmsnorm_reference(rows_TD, *norm), rows_TD
