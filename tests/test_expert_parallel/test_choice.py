"""The rule that picks dispatchers: per number of ranks, device and phase, and what is refused."""

from __future__ import annotations

import pytest
import torch

from expert_parallel.choice import Dispatchers, automatic_row_cap, choose
from expert_parallel.placement import Placement

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "num_ranks", "device", "prefill", "decode"),
    [
        ("auto", 1, CPU, "local", "local"),
        ("auto", 1, GPU, "local", "local"),
        ("all_gather", 1, GPU, "local", "local"),
        ("auto", 4, CPU, "all_to_all", "all_to_all"),
        ("auto", 4, GPU, "all_to_all", "one_sided"),
        ("one_sided", 2, GPU, "one_sided", "one_sided"),
        ("one_sided", 1, CPU, "local", "local"),
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
