"""A file that is written whole: a disk that is full, a process that is gone halfway, links, devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe.engine.whole_file import write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_text_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for text in ("first\n", "a longer second\n", ""):
        write_whole(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text("utf-8") == text and names(tmp_path) == ["a.json"]


def test_text_that_utf8_lacks_is_written_all_the_same(tmp_path: Path) -> None:
    write_whole(tmp_path / "page", "half \ud800 pair")
    assert (tmp_path / "page").read_text("utf-8") == "half \\ud800 pair"


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_disk_that_says_no_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_whole(tmp_path / "a.json", "old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "open") if call == "open" else (os, call)), full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a.json", "new", sync=True)
    monkeypatch.undo()
    assert (tmp_path / "a.json").read_text() == "old" and names(tmp_path) == ["a.json"]


def test_a_disk_that_is_full_while_the_text_is_written(tmp_path: Path) -> None:
    """/dev/full takes nothing; as the part, it says so when the text is flushed."""
    write_whole(tmp_path / "a.json", "old")
    (tmp_path / "part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a.json", "new", part=tmp_path / "part")
    assert (tmp_path / "a.json").read_text() == "old" and names(tmp_path) == ["a.json"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from moe.engine.whole_file import write_whole
def gone(*_):
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = gone
path = Path(sys.argv[1])
write_whole(path, "half of the new", part=path.with_name("part"))
"""


def test_a_process_killed_halfway_leaves_the_old_text_and_the_next_takes_its_part(tmp_path: Path) -> None:
    path, part = tmp_path / "a.json", tmp_path / "part"
    write_whole(path, "old")
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", _KILLED, path], cwd=root).returncode == -signal.SIGKILL
    assert path.read_text() == "old" and names(tmp_path) == ["a.json", "part"]
    write_whole(path, "new", part=part)
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_processes_of_their_own_names_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is between writing and moving, another writes the same file, whole."""
    replace = os.replace

    def slow(part: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            write_whole(path, "theirs")
        assert path.read_text() == "theirs"
        replace(part, path)

    monkeypatch.setattr(os, "replace", slow)
    write_whole(tmp_path / "a.json", "ours")
    assert (tmp_path / "a.json").read_text() == "ours" and names(tmp_path) == ["a.json"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "a.json")
    write_whole(tmp_path / "link.json", "text")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "there" / "a.json").read_text() == "text"
    assert names(tmp_path) == ["link.json", "there"] and names(tmp_path / "there") == ["a.json"]
    (tmp_path / "null").symlink_to("/dev/null")
    write_whole(tmp_path / "null", "text")
    assert Path("/dev/null").is_char_device() and os.readlink(tmp_path / "null") == "/dev/null"
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "there", "text")
