"""The weighted sum with its norm, all rows of a token at once: the bits of combine.py's own kernel."""

from __future__ import annotations

import subprocess

import pytest
import torch
from triton import knobs

from kernels.combine import combine_norm_triton
from kernels.combine_at_once import _combine_at_once_kernel, serves_at_once
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_as_separate
from tests.test_kernels.test_combine import draw, norm_operands

halves = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float16, marks=pytest.mark.interpret, id="interpret-fp16"),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu-bf16"),
    ],
)
"""It takes entries of 16 bits; of these, the interpreter has fp16."""


def rows_in_order(num_tokens: int, top_k: int, width: int, dtype: torch.dtype, device: str):
    """`draw`, where row t * K + k is choice k's, and NaN where that is elsewhere."""
    y_RD, rows_TK, weights_TK = draw(num_tokens, top_k, width, dtype, device)
    in_order_TK = torch.arange(rows_TK.numel(), dtype=torch.int32, device=device).view_as(rows_TK)
    y_RD[: rows_TK.numel()][(rows_TK < 0).flatten()] = torch.nan
    return y_RD, torch.where(rows_TK < 0, rows_TK, in_order_TK), weights_TK


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "with-shared"])
@pytest.mark.parametrize("in_order", [False, True], ids=["anywhere", "in-order"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "width"),
    [
        pytest.param(1, 1, 2048, id="all-choices-here"),
        pytest.param(4, 8, 2048, id="qwen3"),
        pytest.param(8, 6, 2048, id="deepseek-v2-lite"),
        pytest.param(2, 2, 4096, id="mixtral"),
        pytest.param(3, 4, 2880, id="no-power-of-two"),
        pytest.param(70, 3, 1024, id="more-rows"),
    ],
)
@halves
def test_the_bits_of_combine(device, dtype, num_tokens, top_k, width, in_order, shared):
    """A view into wider rows is none that it takes."""
    make = rows_in_order if in_order else draw
    y_RD, rows_TK, weights_TK = make(num_tokens, top_k, width + 8, dtype, device)
    wide_RD, y_RD = y_RD[:, :width], y_RD[:, :width].contiguous()
    residual_TD, norm_D, eps, shared_TD = norm_operands(num_tokens, width, dtype, device, shared=shared)
    assert serves_at_once(y_RD, rows_TK) and not serves_at_once(wide_RD, rows_TK)
    given = (rows_TK, weights_TK, residual_TD, norm_D, eps, shared_TD)
    ours = combine_norm_triton(y_RD, *given, in_order=in_order)
    for each, want in zip(ours, combine_norm_triton(wide_RD, *given, in_order=in_order)):
        assert not bool(each.isnan().any())
        assert_same_as_separate(each, want)


@pytest.mark.parametrize("in_order", [False, True])
@halves
def test_no_rows_and_a_bad_token(device, dtype, in_order):
    """Weights of a bad token are NaN: so is its result, not its neighbour's. A rank may have no rows at all."""
    residual_TD, norm_D, eps, _ = norm_operands(2, 1024, dtype, device, shared=False)
    after = (residual_TD, norm_D, eps)
    weights_TK = torch.tensor([[torch.nan, torch.nan], [0.5, 0.5]], device=device)
    y_RD = torch.ones(4, 1024, dtype=dtype, device=device)
    rows_TK = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    assert serves_at_once(y_RD, rows_TK)
    _, sum_TD = combine_norm_triton(y_RD, rows_TK, weights_TK, *after, in_order=in_order)
    assert bool(sum_TD[0].isnan().all())
    assert_same_as_separate(sum_TD[1], residual_TD[1] + 1)
    if not in_order:
        nowhere = (y_RD[:0], torch.full_like(rows_TK, -1), weights_TK)
        assert_same_as_separate(combine_norm_triton(*nowhere, *after)[1], residual_TD)


def test_what_it_takes():
    y_RD, rows_TK = torch.empty(64, 2048, dtype=torch.bfloat16), torch.empty(8, 8, dtype=torch.int32)
    assert serves_at_once(y_RD, rows_TK) and serves_at_once(y_RD, rows_TK.new_empty(1, 12))
    assert not serves_at_once(y_RD, rows_TK.new_empty(1, 13)), "too many registers"
    assert not serves_at_once(y_RD.float(), rows_TK)
    assert not serves_at_once(y_RD[:, :512].contiguous(), rows_TK), "a program of combine.py has two rows"
    assert not serves_at_once(y_RD[:, :2040].contiguous(), rows_TK)


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("top_k", "width", "shared"), [(12, 2048, True), (8, 2048, False), (2, 4096, False)])
def test_compiles_without_a_stack(tmp_path, arch, in_order, top_k, width, shared):
    args: dict[str, object] = {"row_ptr": "*i32", "weights_ptr": "*fp32", "num_columns": "i32", "eps": "fp32"}
    args |= dict.fromkeys(("y_ptr", "residual_ptr", "norm_ptr", "out_ptr", "sum_ptr"), "*bf16")
    args |= {"shared_ptr": "*bf16" if shared else None, "stride_shared": "i32", "stride_residual": "i32"}
    args |= {"TOP_K": top_k, "WIDTH": width, "BLOCK_D": width, "IN_ORDER": in_order}
    args |= {"PDL": "ahead" if arch >= 90 else False}
    cubin = tmp_path / "cubin"
    cubin.write_bytes(compile_ahead(_combine_at_once_kernel, arch, args, num_warps=8 if width > 2048 else 4))
    usage = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    assert " STACK:0 " in usage, usage
