"""How peers' memory is asked for, seen without a GPU: torch's part is stood for."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert_parallel import peer_memory
from kernels.peer_layout import PeerLayout


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_multicast_is_not_set_up_unless_somebody_asks(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "to be put back")
    if given is None:
        del os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]
    else:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = given
    seen: list[str | None] = []

    def empty(num_bytes: int, device: torch.device) -> torch.Tensor:
        seen.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def rendezvous(own: torch.Tensor, group: Any) -> Any:
        seen.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        return SimpleNamespace(buffer_ptrs=[own.data_ptr()])

    monkeypatch.setattr(peer_memory, "_empty", empty)
    monkeypatch.setattr(peer_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group: Any = SimpleNamespace(rank=0, size=1, process_group=None, barrier=lambda: None)
    layout = PeerLayout(1, 4, 16, 2, torch.bfloat16, torch.bfloat16, sums=False)
    peers = peer_memory.symmetric_memory(group, layout, torch.device("cpu"))
    assert seen == [expected, expected]
    assert not layout.flags_N(peers.own, 0).any() and (layout.slots_XK(peers.own, 4) == -1).all()
