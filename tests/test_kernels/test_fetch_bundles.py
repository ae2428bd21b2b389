"""Listed bundles come to their places, whole and alone; what is called off does not."""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from expert_parallel.host_store import Arena
from kernels.fetch_bundles import (
    _fetch_bundles_kernel,
    fetch_bundles,
    fetch_bundles_reference,
    fetch_bundles_triton,
    flat_rows,
    num_pieces,
)
from kernels.slot_tables import Places
from tests.aot import ARCHS, aot, compile_ahead
from tests.test_kernels.test_slot_places import copy_to, make

RUNS = [
    pytest.param(fetch_bundles_reference, "cpu", id="reference"),
    pytest.param(fetch_bundles_triton, "cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param(fetch_bundles, "cuda", marks=pytest.mark.gpu, id="gpu"),
]
SHAPES = {
    "plain": [((2, 5000), torch.float16), ((3, 2), torch.float16)],  # more than a piece, less than one, 4 bytes wide
    "fp8": [((6, 4096), torch.uint8), ((32, 8), torch.uint8), ((2, 1, 2), torch.float32), ((1, 3), torch.float32)],
    "one": [((4096, 4), torch.float16)],  # just a piece
}
ROWS, G = 7, 4


def bundles(kind: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """(rows in host memory, pinned for a GPU; places that hold all ones)."""
    shapes = {str(number): ((ROWS, *shape), dtype) for number, (shape, dtype) in enumerate(SHAPES[kind])}
    pin_for = torch.device(device, 0) if device == "cuda" else None
    sources = list(Arena(shapes, pin_for=pin_for).tensors.values())
    generator = torch.Generator().manual_seed(0)
    for source in sources:
        source.copy_(torch.randint(2, 120, source.shape, generator=generator))
    return sources, [torch.ones((G, *source.shape[1:]), dtype=source.dtype, device=device) for source in sources]


def listed(kind: str, rows: Sequence[int], to: Sequence[int], device: str) -> Places:
    places = make(ROWS, G)
    places.numbers[0 if kind == "fetch" else 1] = len(rows)
    places.part(f"{kind}_row")[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    places.part(f"{kind}_place")[: len(rows)] = torch.tensor(to, dtype=torch.int32)
    return copy_to(places, device)


def check(sources: list[Tensor], targets: list[Tensor], row_at: dict[int, int]) -> None:
    for source, target in zip(sources, targets):
        for place in range(G):
            wanted = source[row_at[place]] if place in row_at else torch.ones_like(source[0])
            assert torch.equal(target[place].cpu(), wanted), f"place {place}"


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("run", "device"), RUNS)
def test_listed_bundles_come(run, device, kind):
    sources, targets = bundles(kind, device)
    flat = [flat_rows(each) for each in sources], [flat_rows(each) for each in targets]
    run(listed("fetch", [], [], device), *flat)
    check(sources, targets, {})
    run(listed("fetch", [5, 0, 6], [1, 3, 2], device), *flat)
    check(sources, targets, {1: 5, 3: 0, 2: 6})


@pytest.mark.parametrize(("run", "device"), RUNS)
def test_what_is_called_off_does_not_come(run, device):
    """The second of three was called off before its copy began; of the others all pieces are counted."""
    sources, targets = bundles("plain", device)
    flat = [flat_rows(each) for each in sources], [flat_rows(each) for each in targets]
    places, before = listed("ahead", [5, 0, 6], [1, 3, 2], device), listed("fetch", [], [], device)
    places.part("ahead_state")[1] = 2
    run(places, *flat, before=before)
    check(sources, targets, {1: 5, 2: 6})
    assert places.part("ahead_state")[:3].tolist() == [1, 2, 1]
    assert places.part("ahead_pieces")[:3].tolist() == [num_pieces(flat[1]), 0, num_pieces(flat[1])]


@pytest.mark.gpu
def test_bytes_that_changed_on_the_host_are_read_anew():
    sources, targets = bundles("plain", "cuda")
    flat = [flat_rows(each) for each in sources], [flat_rows(each) for each in targets]
    for value in range(5):
        sources[0][2].fill_(value)
        fetch_bundles(listed("fetch", [2], [0], "cuda"), *flat)
        assert bool((targets[0][0] == value).all())


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num", [1, 2, 4])
def test_compiles(arch, num):
    for ahead in (False, True):
        args: dict[str, object] = {"numbers_ptr": "*i32", "counts_ptr": "*i64", "before_ptr": "*i64" if ahead else None}
        for number in range(4):
            width = "i32" if number < num else 1
            args |= {f"src{number}_ptr": "*i64", f"dst{number}_ptr": "*i64", f"width{number}": width}
        args |= {"G": 32, "NUM": num, "AHEAD": ahead, "BLOCK": 1024, "UNROLL": 4, "STAMPS": 13, "TIMED": True}
        assert compile_ahead(_fetch_bundles_kernel, arch, args)
