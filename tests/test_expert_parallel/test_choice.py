"""The rule that picks dispatchers: per number of ranks, device and phase, and what is refused."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from expert_parallel import peer_memory
from expert_parallel.all_gather import AllGatherDispatcher
from expert_parallel.choice import (
    Dispatchers,
    automatic_row_cap,
    choose,
    dispatcher_problems,
    make_dispatchers,
    planned_bytes,
)
from expert_parallel.deep_ep import DeepEPDecodeDispatcher, DeepEPDispatcher
from expert_parallel.group import ExpertGroup
from expert_parallel.placement import Placement
from tests import fake_deep_ep
from tests.ranks import run_ranks, world

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "num_ranks", "device", "prefill", "decode"),
    [
        ("auto", 1, CPU, "local", "local"),
        ("auto", 1, GPU, "local", "local"),
        ("all_gather", 1, GPU, "local", "local"),
        ("auto", 4, CPU, "all_to_all", "all_to_all"),
        ("auto", 4, GPU, "one_sided", "one_sided"),
        ("one_sided", 2, GPU, "one_sided", "one_sided"),
        ("one_sided", 1, CPU, "local", "local"),
        ("deep_ep", 2, GPU, "deep_ep", "deep_ep"),
        ("all_gather", 2, CPU, "all_gather", "all_gather"),
        ("all_to_all", 2, GPU, "all_to_all", "all_to_all"),
    ],
)
def test_the_rule(asked: str, num_ranks: int, device: torch.device, prefill: str, decode: str) -> None:
    choice = choose(asked, num_ranks, device)
    assert (choice.prefill, choice.decode) == (prefill, decode)
    assert prefill in str(choice) and decode in str(choice) and choice.reason in str(choice)


def test_without_peer_access_decode_goes_by_collectives() -> None:
    problems = {"one_sided": "rank 0 on GPU 0 and rank 1 on GPU 1 have no peer access"}
    choice = choose("auto", 2, GPU, problems)
    assert (choice.prefill, choice.decode) == ("all_to_all", "all_gather")
    assert problems["one_sided"] in choice.reason
    with pytest.raises(ValueError, match=r"one_sided cannot be used here: rank 0 on GPU 0 and rank 1 .* give auto"):
        choose("one_sided", 2, GPU, problems)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one_sided cannot be used here: its kernels need GPUs, .* run on cpu"):
        choose("one_sided", 2, CPU)
    with pytest.raises(ValueError, match=r"deep_ep cannot be used here: its kernels need GPUs, .* run on cpu"):
        choose("deep_ep", 2, CPU)
    with pytest.raises(ValueError, match=r"deep_ep cannot be used here: no package; give auto, all_to_all or all_gath"):
        choose("deep_ep", 2, GPU, {"deep_ep": "no package"})
    with pytest.raises(ValueError, match=r"parallel.dispatcher=local, but 2 ranks share the experts"):
        choose("local", 2, CPU)
    with pytest.raises(ValueError, match=r"parallel.dispatcher='deepep' is unknown"):
        choose("deepep", 2, CPU)


def test_a_row_cap_of_its_own_is_twice_the_even_share() -> None:
    assert automatic_row_cap(None, num_ranks=4, top_k=2, max_rows=100) == 400
    assert automatic_row_cap(None, num_ranks=8, top_k=2, max_rows=1) == 16  # one token of each rank always fits
    assert automatic_row_cap(50, num_ranks=4, top_k=2, max_rows=100) == 50


def test_one_rank_has_no_buffers() -> None:
    dispatchers = Dispatchers.local(Placement.contiguous(4, 1), 0, "cpu")
    assert dispatchers.prefill is dispatchers.decode
    assert dispatchers.buffer_bytes(100, 64, torch.float32) == 0


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "one_sided", "deep_ep"])
def test_C22_what_is_planned_is_what_the_dispatchers_say_once_they_exist(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every rank, with rows in fp8 or not, under a cap or none."""
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    choice, placement = choose(name, 4, GPU), Placement.contiguous(9, 4)
    found = set()
    for rank, fp8_rows, row_cap in itertools.product(range(4), (False, True), (None, 64)):
        common: dict[str, Any] = {"top_k": 3, "combine": "fast", "row_cap": row_cap, "fp8_rows": fp8_rows}
        group = ExpertGroup(rank, 4, None)  # pyright: ignore
        made = make_dispatchers(choice, group, placement, device=CPU, **common)
        num_bytes = planned_bytes(choice, rank, placement, 100, 256, torch.bfloat16, **common)
        assert num_bytes == made.buffer_bytes(100, 256, torch.bfloat16) > 0
        found.add((fp8_rows, row_cap, num_bytes))
    assert len({num_bytes for _, _, num_bytes in found}) >= 2  # the cap counts


def test_a_plan_without_the_package_that_knows_the_buffer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # as if it were not installed
    wanted: dict[str, Any] = {"top_k": 2, "combine": "fast", "row_cap": None}
    with pytest.raises(ValueError, match=r"parallel.dispatcher=deep_ep: the package deep_ep cannot be imported"):
        planned_bytes(choose("deep_ep", 2, GPU), 0, Placement.contiguous(8, 2), 8, 256, torch.bfloat16, **wanted)


def test_who_is_only_planned_sends_nothing() -> None:
    group = ExpertGroup.planned(1, 4)
    assert (group.rank, group.size) == (1, 4)
    with pytest.raises(AttributeError, match="process_group"):
        group.barrier()


def problems_of(rank: int, num_ranks: int) -> tuple[dict[str, str], dict[str, str]]:
    group = world(rank, num_ranks)
    return dispatcher_problems(group, CPU), dispatcher_problems(group, CPU, deep_ep=True)


def test_problems_are_the_same_on_all_ranks() -> None:
    first, second = run_ranks(problems_of, 2)
    assert first == second
    assert list(first[0]) == ["one_sided"] and list(first[1]) == ["one_sided", "deep_ep"]
    assert "these are on cpu" in first[1]["deep_ep"]


def test_decode_of_deep_ep_has_a_dispatcher_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the same buffer; elsewhere one dispatcher serves both."""
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    group, placement = ExpertGroup(0, 2, None), Placement.contiguous(4, 2)  # pyright: ignore
    for name, decode_kind in (("deep_ep", DeepEPDecodeDispatcher), ("all_gather", AllGatherDispatcher)):
        choice = choose(name, 2, GPU)
        made = make_dispatchers(choice, group, placement, top_k=2, combine="fast", row_cap=None, device=CPU)
        assert type(made.decode) is decode_kind and (made.decode is made.prefill) == (name == "all_gather")


def meets_nobody(rank: int, num_ranks: int) -> str | None:
    """Rank 1's driver is against it."""

    def no_memory(*_: object) -> None:
        raise RuntimeError("CUDA driver error: operation not permitted\nat some line of some file")

    setattr(peer_memory, "_empty", no_memory if rank else lambda *_: None)  # noqa: B010 - of another type
    setattr(peer_memory, "rendezvous", lambda *_: None)  # noqa: B010
    return peer_memory.meeting_problem(world(rank, num_ranks), torch.device("cpu"))


def test_memory_that_cannot_be_shared_is_a_problem_on_all_ranks() -> None:
    """auto then takes collectives, and one_sided is refused with this text."""
    text = "rank 1 could not share memory with the others (CUDA driver error: operation not permitted)"
    assert run_ranks(meets_nobody, 2) == [text, text]
    assert choose("auto", 2, GPU, {"one_sided": text}).decode == "all_gather"


def test_what_a_library_holds_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, though both dispatchers of DeepEP share it; others hold nothing of the kind."""
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    group, placement = ExpertGroup(0, 2, None), Placement.contiguous(4, 2)  # pyright: ignore
    common = {"top_k": 2, "combine": "fast", "row_cap": None, "device": CPU}
    for name in ("deep_ep", "all_gather"):
        made = make_dispatchers(choose(name, 2, GPU), group, placement, **common)  # pyright: ignore
        destroy = Mock()
        if isinstance(made.prefill, DeepEPDispatcher):
            made.prefill.shared._made = SimpleNamespace(destroy=destroy)
        made.close()
        assert destroy.call_count == (name == "deep_ep")
