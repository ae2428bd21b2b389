"""Replicas by hand, against loops, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.replica_choice import (
    ReplicaColumns,
    _choose_kernel,
    choose_replicas,
    choose_replicas_reference,
    choose_replicas_triton,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.one_process import draw_ids, draw_replicas

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


def test_hand_worked() -> None:
    """The example of the module's docstring, with experts 0 to 6 of one replica each."""
    ranks_E1 = torch.tensor([[0], [0], [1], [1], [0], [1], [0]], dtype=torch.int32)
    slots_E1 = torch.tensor([[0], [3], [0], [1], [1], [2], [2]], dtype=torch.int32)
    columns = ReplicaColumns(ranks_E1, slots_E1, torch.ones(7, dtype=torch.int32))
    targets = choose_replicas(torch.tensor([[4, 2, 6], [7, -1, 2]], dtype=torch.int32), columns, 1)
    assert targets.ranks_TK.tolist() == [[0, 1, 0], [-1, -1, 1]]
    assert targets.slots_TK.tolist() == [[1, 0, 2], [-1, -1, 0]]
    assert targets.firsts_TK.tolist() == [[0, 1, -1], [-1, -1, 1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (9, 3), (129, 8), (300, 5)])
def test_kernel(num_tokens: int, top_k: int, device: str) -> None:
    """K that is no power of two, tokens that fill no block; ids outside the table, replicas with wild columns."""
    columns = draw_replicas(13, 3, "cpu")
    ids_TK = draw_ids(num_tokens, 13, top_k, seed=top_k)
    on_device = ReplicaColumns(*(each.to(device) for each in columns))
    for source in (0, 2):
        wanted = choose_replicas_reference(ids_TK, columns, source)
        found = choose_replicas_triton(ids_TK.to(device), on_device, source)
        for name, own, other in zip(found._fields, found, wanted, strict=True):
            assert torch.equal(own.cpu(), other), name
        for token, ranks in enumerate(wanted.ranks_TK.tolist()):
            firsts = [rank if rank not in ranks[:k] else -1 for k, rank in enumerate(ranks)]
            assert wanted.firsts_TK[token].tolist() == firsts


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    pointers = ("ids", "table_ranks", "table_slots", "count", "ranks", "slots", "firsts")
    args: dict[str, object] = {f"{name}_ptr": "*i32" for name in pointers}
    args |= dict.fromkeys(("num_tokens", "num_experts", "num_replicas", "source"), "i32")
    compile_ahead(_choose_kernel, arch, {**args, "TOP_K": 6, "BLOCK_T": 64, "BLOCK_K": 8, "PDL": arch >= 90})
