"""The heat map of a load file: the numbers that are drawn, a picture, and files that hold nothing to draw."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from launch import canvas, load_picture
from launch.load_picture import relative_load
from router.load_window import LoadWindow, read_load


def test_a_picture_of_a_run(tmp_path: Path) -> None:
    """Layer 0 is dense and is left out; 1 is an expert's fair share of its layer."""
    load = LoadWindow(3, 4, window=2)
    load.push(5, [[0, 0, 0, 0], [8, 0, 0, 0], [1, 1, 1, 1]])
    load.push(10, [[0, 0, 0, 0], [8, 0, 4, 4], [3, 3, 3, 3]], rank_loads_LN=[[0, 0], [4, 4], [4, 4]])
    (tmp_path / "load.json").write_text(load.as_text())
    drawn = relative_load(read_load(tmp_path / "load.json"))
    assert drawn.tolist() == [[2, 0, 1, 1], [1, 1, 1, 1]]
    assert load_picture.main([str(tmp_path / "load.svg"), str(tmp_path / "load.json")]) == 0
    assert b"<svg" in (tmp_path / "load.svg").read_bytes()
    assert load_picture.main([str(tmp_path / "load.json")]) == 0
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.json").write_text(LoadWindow(1, 2, window=1).as_text())
    for words, text in (
        ([str(tmp_path / "x.png"), str(tmp_path / "empty.json")], "holds no rows"),
        ([str(tmp_path / "x.png"), str(tmp_path / "none.json")], "cannot be read"),
        ([], "give a load file, or a picture and a load file"),
        ([str(tmp_path / "x.png")], "cannot be read"),
    ):
        assert load_picture.main(words) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadWindow(1, 2, window=1)
    load.push(1, np.ones((1, 2)))
    (tmp_path / "load.json").write_text(load.as_text())
    monkeypatch.setattr("launch.canvas.Canvas", None)
    with pytest.raises(ValueError, match="a picture needs matplotlib"):
        load_picture.draw_load(read_load(tmp_path / "load.json"), tmp_path / "x.png")


def test_without_matplotlib_the_file_imports_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert importlib.reload(canvas).Canvas is None
    finally:
        monkeypatch.undo()
        assert importlib.reload(canvas).Canvas is not None
