"""Ranks that leave together: in which order, seen from one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.engine.team import Team


@pytest.mark.parametrize(("device", "first"), [("cuda:0", ["device"]), ("cpu", [])])
def test_nobody_leaves_while_its_device_still_works_for_others(
    device: str, first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def notes(name: str) -> Any:
        return lambda *_: did.append(name)

    monkeypatch.setattr(torch.cuda, "synchronize", notes("device"))
    team = object.__new__(Team)
    everyone = SimpleNamespace(barrier=notes("barrier"))
    team.ranks = SimpleNamespace(device=torch.device(device), everyone=everyone, close=notes("group"))  # pyright: ignore
    team.faults = SimpleNamespace(close=notes("faults"))  # pyright: ignore[reportAttributeAccessIssue]
    team._closed = False
    team.close()
    team.close()
    assert did == [*first, "barrier", "faults", "group"]
