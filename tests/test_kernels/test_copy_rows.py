"""Rows in the order of their slots: the very bits, unused entries wild and unread."""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch

from kernels.copy_rows import _copy_rows_kernel, copy_rows, copy_rows_reference, copy_rows_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits
from tests.shapes import WILD_INDEX

BACKENDS = [
    pytest.param(copy_rows_reference, "cpu", id="reference"),
    pytest.param(copy_rows_triton, "cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param(copy_rows, "cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.mark.parametrize("width", [96, 2880, 41])
@pytest.mark.parametrize("used", [0, 1, 7, 8, 9, 129])
@pytest.mark.parametrize(("run", "device"), BACKENDS)
def test_rows(run, device, used, width):
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    wide = torch.randn(50, width + 7, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x_XD = wide[:, 3 : 3 + width]  # rows of wider ones
    index = torch.randint(0, 50, (used,), generator=torch.Generator().manual_seed(1))
    index_R = torch.cat([index, torch.full((9,), WILD_INDEX)]).to(device, torch.int32)
    offsets_S1 = torch.tensor([0, used // 3, used], dtype=torch.int32, device=device)
    out_RD = run(x_XD, index_R, offsets_S1)
    assert out_RD.shape == (used + 9, width) and out_RD.is_contiguous()
    assert_same_bits(out_RD[:used], x_XD[index.to(device)])


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_unused_rows_are_not_written(device):
    """Seven rows of forty are used; the others of a poisoned result stay as they were."""
    x_XD = torch.randn(50, 256, device=device).half()
    index_R = torch.zeros(40, dtype=torch.int32, device=device)
    last, out_RD = torch.tensor([7], dtype=torch.int32, device=device), torch.full_like(x_XD[:40], torch.nan)
    _copy_rows_kernel[(5,)](x_XD, index_R, last, out_RD, 256, 256, ROWS=8, COLUMNS=256, PDL=False)
    assert not bool(out_RD[:7].isnan().any()) and bool(out_RD[7:].isnan().all())


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    args: dict[str, object] = {"x_ptr": "*bf16", "index_ptr": "*i32", "last_ptr": "*i32", "out_ptr": "*bf16"}
    args |= {"stride_x": "i32", "width": "i32", "ROWS": 8, "COLUMNS": 1024, "PDL": arch >= 90}
    assert compile_ahead(_copy_rows_kernel, arch, args)
