"""Sums by hand and over several steps, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.add_offsets import _add_offsets_kernel, add_offsets, add_offsets_reference, add_offsets_triton
from tests.aot import ARCHS, aot, compile_ahead

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


def test_hand_worked() -> None:
    """The last row belongs to no layer of the step."""
    sums = torch.tensor([[0, 2**33], [5, 6], [7, 8]])
    add_offsets(sums, [torch.tensor(each, dtype=torch.int32) for each in ([0, 3], [1, 2])])
    assert sums.tolist() == [[0, 2**33 + 3], [6, 8], [7, 8]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_layers", "num_slots"), [(0, 3), (1, 1), (5, 130), (61, 1100)])
def test_kernel(num_layers: int, num_slots: int, device: str) -> None:
    """Two steps whose offsets lie anywhere; no layer, all of a large network, and more entries than one block's."""
    generator = torch.Generator().manual_seed(num_slots)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    wanted = draw(2**40, num_layers + 1, num_slots + 1)
    found = wanted.to(device)
    for _ in range(2):
        offsets = [draw(2**31 - 1, num_slots + 1).int() for _ in range(num_layers)]
        add_offsets_reference(wanted, offsets)
        add_offsets_triton(found, [each.to(device) for each in offsets])
    assert torch.equal(found.cpu(), wanted)


def test_what_does_not_fit_is_refused() -> None:
    sums, offsets = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    for wrong, words in (([offsets, offsets], "2 layers"), ([offsets[:2]], "shape"), ([offsets.long()], "int64")):
        with pytest.raises(AssertionError, match=words):
            add_offsets(sums, wrong)


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_layers", [1, 61])
def test_compiles(num_layers: int, arch: int) -> None:
    args: dict[str, object] = {"sums_ptr": "*i64", "offsets": ("*i32",) * num_layers, "num_entries": "i32"}
    args |= {"LAYERS": num_layers, "BLOCK": 256, "PDL": "ahead" if arch >= 90 else False}
    compile_ahead(_add_offsets_kernel, arch, args)
