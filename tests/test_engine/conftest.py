"""A folder with the test tokenizer, and engines over the fake network that are closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.engine.engine import Engine
from tests.test_engine.fake_network import make_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture()
def engines() -> Iterator[Any]:
    """Makes engines and closes them."""
    made: list[Engine] = []

    def make(*args: Any, **keys: Any) -> Engine:
        made.append(make_engine(*args, **keys))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
