"""Where the parts of a travelling record lie, byte by byte."""

from __future__ import annotations

import pytest
import torch

from expert_parallel.record import RecordLayout
from kernels.quantize import FP8
from kernels.records import fill_rows


def test_bytes_by_hand() -> None:
    """7 columns of bf16 take 14 bytes, so slots begin at 16; with K = 3 the weights follow at 28."""
    layout = RecordLayout(width=7, dtype=torch.bfloat16, top_k=3, weights=True)
    assert layout.num_bytes == 64
    records = torch.full((2, 64), 255, dtype=torch.uint8)
    layout.rows_XD(records).fill_(1.0)
    layout.slots_XK(records).copy_(torch.tensor([[0, 1, -1], [2, 256, 3]]))
    layout.weights_XK(records).fill_(2.0)
    row, slots, weights = [0x80, 0x3F] * 7, [2, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0, 0], [0, 0, 0, 0x40] * 3
    assert records[1].tolist() == row + [255, 255] + slots + weights + [255] * 24


def test_bytes_by_hand_in_fp8() -> None:
    """130 columns take 130 bytes, so two scales begin at 132; with K = 1 the slot is at 140, the weight at 144."""
    layout = RecordLayout(width=130, dtype=FP8, top_k=1, weights=True)
    assert layout.num_bytes == 192 and layout.num_scales == 2
    records = torch.full((2, 192), 255, dtype=torch.uint8)
    fill_rows(layout.rows_XD(records), torch.ones(2, 130).to(FP8))
    fill_rows(layout.scales_XG(records), torch.tensor([[1.0, 2.0], [0.5, 4.0]]))
    layout.slots_XK(records).fill_(3)
    layout.weights_XK(records).fill_(2.0)
    one, scales, slot, weight = [0x38] * 130, [0, 0, 0, 0x3F, 0, 0, 0x80, 0x40], [3, 0, 0, 0], [0, 0, 0, 0x40]
    assert records[1].tolist() == one + [255, 255] + scales + slot + weight + [255] * 44


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("width", [1, 130, 136, 2048])
@pytest.mark.parametrize("tokens", [[], [4], [1, 1, 0, 4, 2]])
def test_copies_keep_every_bit(dtype: torch.dtype, width: int, tokens: list[int]) -> None:
    """Also of rows in fp8 that 8 bytes divide, and of those that they do not; NaN is a bit pattern as any other."""
    layout = RecordLayout(width, dtype, top_k=1, weights=False)
    x_TD = torch.randint(0, 256, (5, width * dtype.itemsize), dtype=torch.uint8).view(dtype)
    token_X = torch.tensor(tokens, dtype=torch.int32)
    records = layout.empty(len(tokens), torch.device("cpu"))
    fill_rows(layout.rows_XD(records), x_TD, token_X)
    assert torch.equal(records[:, : layout.row_bytes], x_TD.view(torch.uint8)[token_X.long()])
    records = layout.empty(5, torch.device("cpu"))
    fill_rows(layout.rows_XD(records), x_TD)
    assert torch.equal(records[:, : layout.row_bytes], x_TD.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16, 2048])
@pytest.mark.parametrize("top_k", [1, 8])
def test_parts_come_back_and_do_not_overlap(dtype: torch.dtype, width: int, top_k: int) -> None:
    for weights in (False, True):
        layout = RecordLayout(width, dtype, top_k, weights)
        used = width * dtype.itemsize + 4 * top_k * (1 + weights)
        assert layout.num_bytes % 64 == 0 and used <= layout.num_bytes < used + 64 + 4
        records = layout.empty(5, torch.device("cpu"))
        rows_XD = torch.randn(5, width).to(dtype)
        slots_XK = torch.randint(-1, 100, (5, top_k), dtype=torch.int32)
        weights_XK = torch.rand(5, top_k)
        layout.rows_XD(records).copy_(rows_XD)
        layout.slots_XK(records).copy_(slots_XK)
        if weights:
            layout.weights_XK(records).copy_(weights_XK)
            assert torch.equal(layout.weights_XK(records), weights_XK)
        assert torch.equal(layout.rows_XD(records), rows_XD)
        assert torch.equal(layout.slots_XK(records), slots_XK)
        assert layout.rows_XD(layout.empty(0, torch.device("cpu"))).shape == (0, width)


def test_parts_that_are_not_there() -> None:
    layout = RecordLayout(8, torch.float32, 2, weights=False)
    with pytest.raises(AssertionError, match=r"rows in torch\.float32 have no scales"):
        layout.scales_XG(layout.empty(1, torch.device("cpu")))
    with pytest.raises(AssertionError, match="carry no weights"):
        layout.weights_XK(layout.empty(1, torch.device("cpu")))
