"""A decode step's inputs: the kernel against its reference, and the reference against hand-worked rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import decode_inputs as module
from kernels.decode_inputs import Places, decode_inputs, decode_inputs_reference, decode_inputs_triton
from tests.aot import ARCHS, aot, compile_ahead

SIZE = 4


def places(num_places: int, width: int, device: str = "cpu") -> Places:
    generator = torch.Generator().manual_seed(1)
    return Places(
        tables_PM=torch.randint(0, 1000, (num_places, width), generator=generator, dtype=torch.int32).to(device),
        newest_P=torch.arange(100, 100 + num_places).to(device),
        temperature_P=torch.rand(num_places, generator=generator).to(device),
        seed_P=torch.arange(num_places).mul(-(2**60)).to(device),
    )


def copies(state: Places) -> Places:
    return Places(*(x.clone() for x in state))


def random_rows(batch: int, num_places: int, width: int) -> Tensor:
    """Distinct places, the last of them padding; some tokens known, some only on the device."""
    generator = torch.Generator().manual_seed(2)
    rows_4B = torch.zeros(4, batch, dtype=torch.int64)
    rows_4B[0] = torch.randint(0, 50, (batch,), generator=generator) - torch.arange(batch) % 2 * 100
    rows_4B[0].clamp_(min=-1)
    rows_4B[1] = torch.randperm(num_places - 1, generator=generator)[:batch]
    rows_4B[2] = torch.randint(0, width * SIZE, (batch,), generator=generator)
    rows_4B[3] = torch.randint(1000, 2000, (batch,), generator=generator)
    rows_4B[:, -1] = torch.tensor([0, num_places - 1, -1, 0])
    return rows_4B


def test_hand_worked_rows() -> None:
    """A known token in a new block, a drawn one in an old block, one whose draw failed, padding."""
    state = places(6, 3)
    state.newest_P[2] = -1
    state.tables_PM[:] = torch.tensor([7, 8, 9], dtype=torch.int32)
    rows_4B = torch.tensor([[33, -1, -1, 0], [4, 1, 2, 5], [8, 5, 0, -1], [70, 8, 7, 0]])
    got = decode_inputs(rows_4B, state, block_size=SIZE, width=3)
    assert got.token_ids_B.tolist() == [33, 101, 0, 0]
    assert got.positions_B.tolist() == [8, 5, 0, 0]
    assert got.slot_mapping_B.tolist() == [70 * SIZE, 8 * SIZE + 1, 7 * SIZE, -1]
    assert got.kv_lens_B.tolist() == [9, 6, 1, 0]
    assert got.block_tables_BM.tolist() == [[7, 8, 70], [7, 8, 9], [7, 8, 9], [0, 8, 9]]
    assert got.real_B.tolist() == [True, True, True, False]
    assert got.draw_position_B.tolist() == [9, 6, 1, 0]
    assert torch.equal(got.temperature_B, state.temperature_P[[4, 1, 2, 5]])
    assert got.seed_B.tolist() == [-(2**62), -(2**60), -(2**61), -(2**60) * 5]
    assert state.tables_PM[4].tolist() == [7, 8, 70] and state.tables_PM[0].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("batch", "width"),
    [
        pytest.param(1, 1, id="padding-alone"),
        pytest.param(2, 3, id="narrow"),
        pytest.param(33, 257, id="tables-one-above-a-tile"),
    ],
)
def test_kernel_makes_what_the_reference_makes(backend, batch: int, width: int) -> None:
    state = places(64, width + 5, backend.device)
    rows_4B = random_rows(batch, 64, width).to(backend.device)
    kept = copies(state)
    want = decode_inputs_reference(rows_4B, kept, block_size=SIZE, width=width)
    got = decode_inputs_triton(rows_4B, state, block_size=SIZE, width=width)
    for name, one, other in zip(got._fields, got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), name
    for name, one, other in zip(state._fields, state, kept, strict=True):
        assert torch.equal(one, other), name


def test_no_rows(backend) -> None:
    state = places(4, 2, backend.device)
    rows_40 = torch.zeros(4, 0, dtype=torch.int64, device=backend.device)
    assert decode_inputs_triton(rows_40, state, block_size=SIZE, width=2).block_tables_BM.shape == (0, 2)


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    args: dict[str, object] = {
        "rows_ptr": "*i64",
        "tables_ptr": "*i32",
        "newest_ptr": "*i64",
        "temperature_ptr": "*fp32",
        "seed_ptr": "*i64",
        "token_ids_ptr": "*i64",
        "positions_ptr": "*i64",
        "slots_ptr": "*i64",
        "kv_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
        "real_ptr": "*i1",
        "row_temperature_ptr": "*fp32",
        "row_seed_ptr": "*i64",
        "draw_position_ptr": "*i64",
        "batch": "i32",
        "table_stride": "i32",
        "width": "i32",
        "BLOCK_SIZE": 16,
        "TABLE_BLOCK": module.TABLE_BLOCK,
        "PDL": arch >= 90,
    }
    assert compile_ahead(module._decode_inputs_kernel, arch, args, num_warps=1)
