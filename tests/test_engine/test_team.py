"""Ranks that leave together: in which order, seen from one of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe.engine.team as team_module
from configs.schema import Config, EngineConfig
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


class BroughtUp(Exception):
    """That is as far as it goes here."""


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_multicast_is_not_set_up_unless_somebody_asks(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch reads the variable when memory is shared."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.setenv(name, given or "put back afterwards")
    if given is None:
        del os.environ[name]

    def bring_up(*_: Any) -> None:
        raise BroughtUp(os.environ.get(name))

    monkeypatch.setattr(team_module, "bring_up", bring_up)
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(BroughtUp, match=f"^{expected}$"):
        Team(Config(engine=EngineConfig(device="cpu")), {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
