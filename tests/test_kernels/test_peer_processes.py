"""The kernels of one_sided in processes that write into each other's memory for real: interpreted, all at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from expert_parallel.group import ExpertGroup
from expert_parallel.one_sided import OneSidedDispatcher
from expert_parallel.replicas import ReplicaTable
from kernels import peer_combine, peer_dispatch, peer_flags
from tests.expert_checks import check_against_reference, check_one_ranks_bits
from tests.expert_ranks import COMBINES, Case, Key, Outcome, case_named, run_case
from tests.peer_files import PeerFiles
from tests.ranks import run_ranks, world


def make_on(
    folder: Path, group: ExpertGroup, replicas: ReplicaTable, slots_per_rank: tuple[int, ...], case: Case, key: Key
) -> OneSidedDispatcher:
    own = folder / f"{case.name} {key.combine}"
    own.mkdir(exist_ok=True)
    cap = case.row_cap(group.size, case.top_k) if case.row_cap else None
    peers, placed = PeerFiles(str(own)), (group, replicas, slots_per_rank)
    # Without a clock a wait counts its looks, so many that the run's own limit comes first.
    return OneSidedDispatcher(
        *placed, top_k=case.top_k, combine=key.combine, row_cap=cap, make_peers=peers, timeout_s=1e6, device="cpu"
    )


def with_kernels(rank: int, num_ranks: int, folder: Path, keys: list[Key]) -> dict[Key, Outcome]:
    """Each program takes several pieces."""
    for module in (peer_dispatch, peer_flags, peer_combine):
        vars(module)["uses_triton"] = lambda x: True
    peer_dispatch.MOST_PROGRAMS, peer_combine.WARPS, peer_combine.SENDING, peer_combine.SENDING_ROWS = 3, 16, 8, 8
    group = world(rank, num_ranks)
    return {key: run_case(group, key, partial(make_on, folder), padded=True) for key in keys}


@pytest.mark.interpret
def test_kernels_in_real_processes(tmp_path: Path) -> None:
    """k is more than a rank's experts, which do not divide; and as many rounds as rows, on the same buffers."""
    cases = ("k is all experts", "one row a round")
    keys = [Key(name, combine, torch.float32) for name in cases for combine in COMBINES]
    outcomes = run_ranks(with_kernels, 2, tmp_path, keys, timeout_s=120.0)
    for name in cases:
        check_one_ranks_bits(outcomes, case_named(name), padded=True)
        check_against_reference(outcomes, case_named(name), padded=True, same_order=True)
