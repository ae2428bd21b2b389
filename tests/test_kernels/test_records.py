"""Records and rows in order: by hand, and the kernels against the references, byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expert_parallel.record import RecordLayout
from kernels.pack import pack_reference
from kernels.quantize import FP8, quantize_rows_reference
from kernels.records import (
    RecordParts,
    RecordSource,
    _order_kernel,
    _write_kernel,
    rows_in_order,
    rows_in_order_reference,
    rows_in_order_triton,
    write_records,
    write_records_reference,
    write_records_triton,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


def test_hand_worked() -> None:
    """Two tokens, two ranks: token 0 goes to both, token 1 to rank 1 with both of its choices."""
    ranks_TK, slots_TK = torch.tensor([[0, 1], [1, 1]]).int(), torch.tensor([[5, 6], [7, 8]]).int()
    parts = RecordParts(torch.zeros(3, 1), torch.zeros(3, 2).int(), torch.zeros(3, 2), None)
    x_TD, weights_TK = torch.tensor([[10.0], [20.0]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    token_X, offsets_N1 = torch.tensor([0, 0, 1]).int(), torch.tensor([0, 1, 3]).int()
    write_records(parts, RecordSource(x_TD, None, weights_TK, ranks_TK, slots_TK, token_X, offsets_N1))
    assert parts.rows_XD.tolist() == [[10.0], [10.0], [20.0]]
    assert parts.slots_XK.tolist() == [[5, -1], [-1, 6], [7, 8]]
    assert parts.weights_XK is not None
    assert_same_bits(parts.weights_XK, weights_TK[token_X])
    y_RD, row_XK = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2, -1], [-1, -1], [0, 1]]).int()
    assert rows_in_order(y_RD, row_XK, 3).tolist() == [[3.0], [1.0], [2.0]]


def draw_round(num_tokens: int, num_ranks: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranks and slots of each choice, and tokens and offsets of the records; some choices go nowhere."""
    generator = torch.Generator().manual_seed(num_tokens)
    ranks_TK = torch.randint(-1, num_ranks, (num_tokens, top_k), generator=generator).int()
    slots_TK = torch.randint(0, 99, (num_tokens, top_k), generator=generator).int().where(ranks_TK >= 0, -1)
    firsts_TK = ranks_TK.clone()
    for k in range(1, top_k):
        firsts_TK[(ranks_TK[:, :k] == ranks_TK[:, k : k + 1]).any(dim=1), k] = -1
    packed = pack_reference(firsts_TK, torch.arange(num_ranks, dtype=torch.int32), num_ranks)
    return ranks_TK, slots_TK, packed.row_token_R[: int(packed.offsets_S1[-1])], packed.offsets_S1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_ranks", "width"), [(0, 2, 40), (1, 1, 40), (17, 3, 2880), (40, 5, 136)])
def test_records(num_tokens: int, num_ranks: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Nothing else of a record is touched; x is a view into wider, NaN rows."""
    ranks_TK, slots_TK, token_X, offsets_N1 = draw_round(num_tokens, num_ranks, 3)
    generator = torch.Generator().manual_seed(width)
    wide_TD = torch.full((num_tokens, width + 8), torch.nan)
    wide_TD[:, :width] = torch.randn(num_tokens, width, generator=generator)
    x_TD, scales_GT = wide_TD[:, :width], None
    if dtype == FP8:
        x_TD, scales_GT = quantize_rows_reference(x_TD.bfloat16().contiguous())
    weights_TK = torch.rand(num_tokens, 3, generator=generator)
    layout = RecordLayout(width, dtype, 3, weights=dtype == torch.float32)
    given = RecordSource(x_TD, scales_GT, weights_TK, ranks_TK, slots_TK, token_X, offsets_N1)
    wanted, found = (torch.full((len(token_X), layout.num_bytes), 255, dtype=torch.uint8) for _ in range(2))
    found = found.to(device)
    write_records_reference(layout.parts(wanted), given)
    there = RecordSource(*(None if each is None else each.to(device) for each in given))  # pyright: ignore
    write_records_triton(layout.parts(found), there)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_records", "width"), [(0, 40), (1, 40), (30, 2880)])
def test_rows_in_order(num_records: int, width: int, device: str) -> None:
    generator = torch.Generator().manual_seed(width)
    row_XK = torch.randperm(3 * num_records, generator=generator).view(num_records, 3).int()
    row_XK[torch.rand(row_XK.shape, generator=generator) < 0.4] = -1
    num_rows = int((row_XK >= 0).sum())
    y_RD = torch.randn(max(3 * num_records, 1), width, generator=generator)
    wanted = rows_in_order_reference(y_RD, row_XK, num_rows)
    assert_same_bits(wanted, y_RD[row_XK[row_XK >= 0].long()])
    assert_same_bits(rows_in_order_triton(y_RD.to(device), row_XK.to(device), num_rows).cpu(), wanted)


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scaled", [False, True])
def test_compiles(arch: int, scaled: bool) -> None:
    rows = "*i8" if scaled else "*bf16"
    args: dict[str, object] = {"rows_ptr": rows, "x_ptr": rows, "out_slots_ptr": "*i32", "weights_ptr": "*fp32"}
    args |= {"out_weights_ptr": None if scaled else "*fp32"}
    args |= dict.fromkeys(("scales_ptr", "out_scales_ptr"), "*fp32" if scaled else None)
    args |= {f"{name}_ptr": "*i32" for name in ("ranks", "slots", "token", "offsets")}
    sizes = ("num_columns", "num_scales", "num_ranks", "stride_row", "stride_word", "stride_x")
    args |= dict.fromkeys((*sizes, "stride_scale_g", "stride_scale_t"), "i32")
    blocks = {"TOP_K": 6, "BLOCK_K": 8, "BLOCK_N": 2, "BLOCK_G": 16, "BLOCK_D": 2048, "PDL": arch >= 90}
    compile_ahead(_write_kernel, arch, args | blocks)
    order: dict[str, object] = {"y_ptr": "*bf16", "row_ptr": "*i32", "place_ptr": "*i64", "out_ptr": "*bf16"}
    order |= {"num_columns": "i32", "stride_y": "i32", "BLOCK_D": 2048, "PDL": arch >= 90}
    compile_ahead(_order_kernel, arch, order)
