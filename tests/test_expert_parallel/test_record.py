"""Where the parts of a travelling record lie, byte by byte."""

from __future__ import annotations

import pytest
import torch

from expert_parallel.record import RecordLayout


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


def test_weights_that_are_not_there() -> None:
    layout = RecordLayout(8, torch.float32, 2, weights=False)
    with pytest.raises(AssertionError, match="carry no weights"):
        layout.weights_XK(layout.empty(1, torch.device("cpu")))
