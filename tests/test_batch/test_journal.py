"""The journal: what is written comes back whole, whatever is torn or damaged; what the writer promises."""

from __future__ import annotations

import errno
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.batch import journal_writer
from moe.batch.journal import (
    ANSWERED,
    Entry,
    Header,
    JournalError,
    JournalReader,
    RecordReader,
    frame,
    header_frame,
    parse_frame,
)
from moe.batch.journal_writer import JournalWriter, is_being_written
from moe.batch.ledger import Ledger
from moe.batch.lines import Line, dump_line

HEADER = Header(3, 1, {"model": "demo"})


def until(true: Any, timeout_s: float = 60.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def numbers(path: Path) -> list[int]:
    return [entry.number for entry in JournalReader(path)]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
entries = st.tuples(
    st.integers(1, 1 << 40),
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([ANSWERED, "invalid_line", "timeout"]),
    st.builds(lambda text: dump_line({"id": text}), texts),
)


@settings(max_examples=200, deadline=None)
@given(entries)
def test_a_record_comes_back(entry: tuple[int, int, str, bytes]) -> None:
    raw = frame(*entry)
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n")
    assert parse_frame(raw) == Entry(*entry, 0, len(raw)) and parse_frame(raw[:-1]) == Entry(*entry, 0, len(raw) - 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(entries, max_size=5), st.data())
def test_c13_no_whole_record_before_a_tear_is_lost(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, int, str, bytes]], data: st.DataObject
) -> None:
    """Torn at any byte, with anything behind the tear: another run's half line, or zeros that a file system leaves."""
    path = tmp_path_factory.getbasetemp() / "torn.journal"
    frames = [header_frame(HEADER), *(frame(*entry) for entry in written)]
    whole = b"".join(frames)
    tear = data.draw(st.integers(0, len(whole)))
    rest = data.draw(st.one_of(st.just(b""), st.binary(max_size=30), st.just(bytes(64))))
    path.write_bytes(whole[:tear] + rest)
    ends, end = [], 0
    for each in frames:
        end += len(each)
        ends.append(end)
    before = [entry for entry, entry_end in zip(written, ends[1:]) if entry_end <= tear]
    reader = JournalReader(path)
    try:
        if (header := reader.header()) is not None:
            assert header == HEADER
    except JournalError as error:
        assert tear < ends[0] and "move it away" in str(error)
    found = [(entry.number, entry.digest, entry.kind, entry.record) for entry in reader]
    assert found[: len(before)] == before
    # A record that lacks its line end alone is whole as well.
    assert len(found) <= len(before) + 1 and all(each in written for each in found)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_a_fault(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.journal"
    path.write_bytes(content)
    reader = JournalReader(path)
    assert list(reader) == [] and reader.damaged == len(content.split(b"\n")) - content.endswith(b"\n") - (not content)
    try:
        assert reader.header() is None and b"\n" not in content
    except JournalError as error:
        assert str(path) in str(error)


def test_a_damaged_record_in_the_middle_costs_that_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    raw = bytearray(header_frame(HEADER) + b"".join(frame(n, n, ANSWERED, b'{"a": 1}\n') for n in (1, 2, 3)))
    raw[raw.index(b'{"a"', raw.index(b"\t2\t")) + 2] ^= 1
    path.write_bytes(bytes(raw))
    reader = JournalReader(path)
    assert [entry.number for entry in reader] == [1, 3] and reader.damaged == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not ours\n", "its first line is damaged"),
        (
            frame(0, 0, "header", b'{"journal": 9, "run": 1, "rank": 0, "fingerprint": {}}\n'),
            "reads and writes format 2 alone",
        ),
        (frame(0, 0, "header", b"[]\n"), "reads and writes format 2 alone"),
        (frame(7, 0, ANSWERED, b"{}\n"), "its first line is damaged"),
    ],
)
def test_a_foreign_file_is_named_with_the_way_out(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=rf"{path} is no journal.*{words}.*move it away, or give job.overwrite=true"):
        JournalReader(path).header()


def test_records_are_on_disk_within_a_moment_and_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with JournalWriter(path, HEADER) as writer:
        assert JournalReader(path).header() == HEADER
        writer.append(5, 50, b'{"id": 5}\n')
        until(lambda: numbers(path) == [5])  # nobody flushes
        for number in range(6, 200):
            writer.append(number, 0, b"{}\n", "timeout")
        assert is_being_written(path)
    assert numbers(path) == list(range(5, 200)) and not is_being_written(path)
    assert [entry.kind for entry in JournalReader(path)][:2] == [ANSWERED, "timeout"]


def test_writes_are_gathered_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    syncs: list[float] = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(journal_writer, "SYNC_S", 0.2)
    monkeypatch.setattr(os, "write", lambda file, data: (writes.append(len(data)), write(file, data))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (syncs.append(time.monotonic()), sync(file))[1])
    with JournalWriter(tmp_path / "j", HEADER) as writer:
        opened = 2  # the header's and the folder's
        assert len(syncs) == opened
        began = time.monotonic()
        for number in range(1, 1001):
            writer.append(number, 0, b"{}\n")
        until(lambda: len(syncs) > opened)  # while the journal is open
        gathered_s = time.monotonic() - began
        writer.append(2000, 0, b"{}\n")
    assert len(writes) <= 3 + gathered_s / journal_writer.GATHER_S  # not one for each record
    # The last one comes with the end; between those before it lies a while, however many a busy machine makes of them.
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(syncs[opened:-1]))
    assert len(syncs) >= opened + 2 and numbers(tmp_path / "j")[-1] == 2000


def test_a_journal_without_records_leaves_nothing(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "j", HEADER):
        assert (tmp_path / "j").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
def test_c37_a_disk_that_says_no_is_told_once_and_what_was_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    path, write = tmp_path / "j", os.write
    writer = JournalWriter(path, HEADER)
    writer.append(1, 0, b'{"id": 1}\n')
    until(lambda: numbers(path) == [1])
    room = 50

    def failing(file: int, data: Any) -> int:
        nonlocal room
        if not room:
            raise OSError(number, os.strerror(number))
        done, room = write(file, bytes(data)[:room]), 0
        return done

    monkeypatch.setattr(os, "write", failing)
    for each in range(2, 12):
        writer.append(each, 0, b'{"id": 2, "text": "long enough"}\n')
    until(lambda: writer._error is not None)
    with pytest.raises(OSError, match=words) as caught:
        writer.append(12, 0, b"{}\n")
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match=words):
        writer.close()
    writer.close()
    monkeypatch.undo()
    assert numbers(path) == [1]  # half of the second is there, and is no record


def test_no_fault_of_the_writing_is_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "MAX_GATHERED_BYTES", 100)
    journal = JournalWriter(tmp_path / "j", HEADER)

    def failing(file: int, data: Any) -> int:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(os, "write", failing)
        for number in range(1, 1000):
            journal.append(number, 0, b"x" * 50 + b"\n")
    with pytest.raises(MemoryError):
        journal.close()


def test_a_slow_disk_holds_the_answers_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "MAX_GATHERED_BYTES", 1000)
    gathered: list[int] = []
    with JournalWriter(tmp_path / "j", HEADER) as writer:
        for number in range(1, 500):
            writer.append(number, 0, b'{"id": "abcdefghijklmnopqrstuvwxyz"}\n')
            gathered.append(writer._given - writer._written)
    assert max(gathered) < 1000 + 100 and len(numbers(tmp_path / "j")) == 499


def test_records_are_read_at_their_places_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.batch.journal.OPEN_JOURNALS", 2)
    paths = [tmp_path / f"j{index}" for index in range(4)]
    for index, path in enumerate(paths):
        with JournalWriter(path, Header(index + 1, 0, {})) as writer:
            for number in range(20 - index, 0, -4):
                writer.append(number, number, b'{"n": %d, "run": %d}\n' % (number, index))
    ledger, seen = Ledger(), Ledger()
    ledger.read(paths)
    assert len(list(seen.pending(Line(number, {}) for number in range(1, 21)))) == 20
    with RecordReader(paths) as reader:
        found = [(number, json.loads(record)["n"]) for number, record in reader.at(ledger.places(seen))]
        assert len(reader._open) <= 2
    assert found == [(number, number) for number in range(1, 21)]
