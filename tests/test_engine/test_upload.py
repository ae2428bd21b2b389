"""Arrays that travel as one copy come back as they were, aligned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe.engine.upload import ALIGNMENT, upload


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pieces_keep_shape_dtype_and_alignment(device: str) -> None:
    arrays = [
        np.arange(3, dtype=np.int64),
        np.zeros((0, 5), np.int32),
        np.array([[7, -1, 2]], np.int32),
        np.array([True, False, True, True, False]),
        np.empty(0, np.int64),
        np.array([2**62], np.int64),
    ]
    pieces = upload(arrays, torch.device(device))
    for array, piece in zip(arrays, pieces, strict=True):
        assert piece.device.type == device and piece.data_ptr() % ALIGNMENT == 0
        assert np.array_equal(piece.cpu().numpy(), array) and piece.cpu().numpy().dtype == array.dtype


def test_transposed_arrays_are_written_in_their_own_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert np.array_equal(upload([array], torch.device("cpu"))[0].numpy(), array)
