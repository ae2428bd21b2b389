"""Host memory for experts: exact sizes, one copy for the ranks of a node, and what is said when it cannot be pinned."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expert_parallel import host_memory, host_store
from expert_parallel.host_store import ALIGNMENT, Arena, SharedFiles, arena_bytes, make_arenas, node_key
from tests.ranks import run_ranks, world

GPU = torch.device("cuda", 0)
SHAPES = {"w13": ((5, 6, 3), torch.bfloat16), "w2": ((5, 3, 3), torch.float8_e4m3fn), "scale": ((5, 1), torch.float32)}


def test_C50_an_arena_takes_what_its_tensors_take() -> None:
    """Not the next power of two: 128 experts of 9 MiB and one matrix of 129.5 MiB, as the case has them."""
    expert = {"w13": ((128, 1536, 2048), torch.bfloat16), "w2": ((128, 2048, 768), torch.bfloat16)}
    assert arena_bytes(expert) == 128 * 9 * 2**20
    matrix = {"w": ((259 * 2**18,), torch.bfloat16)}
    assert arena_bytes(matrix) == 2 * 259 * 2**18 == int(129.5 * 2**20)
    assert 0 <= arena_bytes(SHAPES) - (5 * 18 * 2 + 5 * 9 + 5 * 4) < 4096 + 3 * ALIGNMENT


def test_tensors_of_an_arena_lie_apart_and_outlive_it() -> None:
    tensors = Arena(SHAPES).tensors
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == SHAPES
    starts = [tensor.data_ptr() for tensor in tensors.values()]
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors.values()]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    for number, tensor in enumerate(tensors.values()):
        tensor.view(torch.uint8).fill_(number + 1)
    assert [int(tensor.view(torch.uint8).float().mean()) for tensor in tensors.values()] == [1, 2, 3]


def write_and_read(rank: int, num_ranks: int) -> tuple[list[float], int]:
    """Every rank writes its own row; then all read all."""
    group = world(rank, num_ranks)
    assert len(set(group.gather_objects(node_key()))) == 1
    shapes = {"x": ((num_ranks, 1000), torch.float32)}
    files = SharedFiles.make([arena_bytes(shapes)]) if rank == 0 else None
    names = group.gather_objects(None if files is None else files.names)[0]
    files = files or SharedFiles.open(names)
    (arena,) = make_arenas([shapes], files.files)
    group.barrier()
    files.close()
    x_RX = arena.tensors["x"]
    x_RX[rank] = rank + 1.0
    group.barrier()
    found = x_RX.mean(dim=1).tolist()
    group.barrier()
    kept = sum("memfd:experts" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return found, kept


def test_ranks_of_a_node_see_one_memory() -> None:
    for found, kept in run_ranks(write_and_read, 3):
        assert found == [1.0, 2.0, 3.0] and kept == 1


def test_C50_memory_that_cannot_be_pinned_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(host_store, "_cuda", lambda: refused)
    monkeypatch.setattr(host_store.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda which: (65536, 65536))
    with pytest.raises(ValueError, match=r"^4096 bytes of host memory .* could not be pinned \(CUDA error 2\)"):
        Arena(SHAPES, pin_for=GPU)
    with pytest.raises(ValueError, match=r"locked memory \(ulimit -l\) is 65536 bytes\. Free host memory, raise the"):
        make_arenas([SHAPES] * 3, [None] * 3, pin_for=GPU)


def test_what_was_pinned_is_let_go_with_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: set[int] = set()
    monkeypatch.setattr(host_store.torch.cuda, "device", lambda device: nullcontext())

    def register(address: int, size: int, flags: int) -> int:
        pinned.add(address)
        return 0

    monkeypatch.setattr(
        host_store, "_cuda", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.remove)
    )
    tensors = Arena(SHAPES, pin_for=GPU).tensors
    part = tensors["w2"][1:3]
    assert pinned == {tensors["w13"].data_ptr()}
    del tensors
    assert pinned
    del part
    assert not pinned
