"""What a new run does with what it finds beside the output: begin, go on, or nothing, because all is done already.

Knows journals, marks and fingerprints by their names; knows nothing of models or lines. Only the first rank asks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from configs.schema import JobConfig
from moe.batch.journal import Header, JournalReader, RecordReader
from moe.batch.journal_writer import is_being_written
from moe.batch.ledger import Ledger
from moe.batch.monitor import ErrorNote
from moe.batch.output_lock import PATIENCE_S
from moe.batch.records import error_of
from moe.batch.run_files import JournalFile, Mark, RunFiles

SHOWN_KEYS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """`whole`: the output is there and made from the same; nothing is to be done. Else `run` is this run's number, and
    `ledger` knows the lines that earlier runs have done."""

    run: int = 1
    ledger: Ledger = field(default_factory=Ledger)
    whole: Mark | None = None


def made_from(fingerprint: Mapping[str, str], job: JobConfig) -> dict[str, str]:
    """What a whole output follows from: the answers' fingerprint, and how much of the input it answers."""
    return {**fingerprint, "job.limit": json.dumps(job.limit)}


def begin_run(
    files: RunFiles,
    fingerprint: dict[str, str],
    job: JobConfig,
    *,
    overwrite: bool,
    restarted: bool = False,
    rereadable: bool = True,
) -> Start:
    """Decide, and clear away what is of no use any more. ValueError where the user must decide first. The caller holds
    the output's lock.

    `overwrite`: an output, or an unfinished run of other settings, may be replaced. `restarted`: what is there,
    unfinished or whole, is of an earlier attempt of this very launch; it is kept whatever was asked of older runs.
    `rereadable`: the fingerprint knows what the input holds; else nobody can say that an output answers it.
    """
    made = made_from(fingerprint, job)
    mode = "auto" if restarted and job.resume_mode == "never" else job.resume_mode
    _wait_for_writers(files, files.journals())
    if mode == "never" and overwrite:
        files.drop_journals()
    journals = files.journals()
    mark = files.mark() if rereadable else None
    # A mark goes before the first journal is made: journals beside a whole output are its own, and on their way out.
    kept = mode != "never" and (restarted or not overwrite or bool(journals))
    if kept and mark is not None and mark.fingerprint == made:
        files.drop_journals()
        return Start(whole=mark)
    headers: dict[JournalFile, Header] = {}
    for journal in journals:
        header = JournalReader(journal.path).header()
        if header is None:
            files.remove(journal.path)  # killed at birth
        else:
            headers[journal] = header
    if headers and not _goes_on(files, fingerprint, mode, overwrite=overwrite, latest=headers[max(headers)]):
        headers = {}
    if not headers:
        if mode == "require":
            raise ValueError(
                f"job.resume=require: beside output={files.output} there is no unfinished run; give the output of one, "
                "or job.resume=auto."
            )
        _refuse_output(files, made, overwrite=overwrite)
        files.drop_journals()
        files.drop_mark()
        return Start()
    promised = files.promised()
    if promised is None or promised.fingerprint != made:  # else a crash between the moves: they are ours
        _refuse_output(files, made, overwrite=overwrite)
    return _resume(list(headers), job)


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The keys that differ, with both values.

    >>> differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    'b=2 there, 3 now; c not set there, 4 now'
    """
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    texts = [f"{name}{_shown(old.get(name), '=')} there, {_shown(new.get(name))} now" for name in names[:SHOWN_KEYS]]
    more = [f"and {len(names) - SHOWN_KEYS} more"] if len(names) > SHOWN_KEYS else []
    return "; ".join(texts + more)


def _shown(value: str | None, equals: str = "") -> str:
    if value is None:
        return " not set" if equals else "not set"
    return f"{equals}{value}"


def _goes_on(files: RunFiles, fingerprint: dict[str, str], mode: str, *, overwrite: bool, latest: Header) -> bool:
    """Whether the unfinished run is resumed; False: it may be dropped."""
    if mode == "never":
        raise ValueError(
            f"output={files.output}: {files.journals()[-1].path.name} holds records of a run that did not end; go on "
            "with it (job.resume=auto), give another output, or job.overwrite=true to drop them."
        )
    if latest.fingerprint == fingerprint:
        return True
    differs = differing(latest.fingerprint, fingerprint)
    if mode == "force":
        logger.warning("going on with a run of other settings (job.resume=force): %s", differs)
        return True
    if overwrite and mode == "auto":
        logger.warning("an unfinished run of other settings is dropped (job.overwrite): %s", differs)
        return False
    raise ValueError(
        f"output={files.output}: the unfinished run there was made with other settings: {differs}. Give the same "
        "ones, another output, job.resume=force to keep its records and go on with these settings, or "
        "job.overwrite=true to drop its records."
    )


def unfinished(files: RunFiles) -> bool:
    """Whether records of an unfinished run are there, so that a run can go on."""
    return bool(files.journals())


def kept_errors(files: RunFiles, ledger: Ledger) -> Iterator[ErrorNote]:
    """A note of each error record that earlier runs have made and that stands."""
    with RecordReader([journal.path for journal in files.journals()]) as reader:
        for number, record in reader.at(ledger.failed_places()):
            line_id, message = error_of(json.loads(record))
            yield ErrorNote(number, None, line_id, ledger.kind_of(number), message)


def _refuse_output(files: RunFiles, made: dict[str, str], *, overwrite: bool) -> None:
    existing = [] if overwrite else [path for path in files.existing() if _holds_something(path)]
    if not existing:
        return
    name = files.output if existing == files.finals[:1] else existing[0]
    raise ValueError(
        f"output={name} exists{_difference(files, made)}; give another name, or job.overwrite=true to replace it."
    )


def _holds_something(path: Path) -> bool:
    """An empty file may be replaced unasked; what cannot be looked at may not."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return True


def _difference(files: RunFiles, made: dict[str, str]) -> str:
    """How the output that is there differs from the one that is asked for, as far as its mark says."""
    mark = files.promised()
    if mark is None:
        return ""
    if mark.sizes.keys() != {final.name for final in files.finals}:
        return f" and was made with job.shards={len(mark.sizes)}"
    if files.mark() is None:  # somebody touched it
        return ""
    if differs := differing(mark.fingerprint, made):
        return f" and was made with other settings: {differs}"
    return ", whole; whether it answers what the input holds now, as of standard input, cannot be told"


def _resume(journals: list[JournalFile], job: JobConfig) -> Start:
    ledger = Ledger()
    damaged = ledger.read([journal.path for journal in journals])
    done, failed = ledger.num_done, ledger.num_failed
    if damaged:
        logger.warning("%d torn or damaged records of earlier runs are left out; their lines are open again", damaged)
    if job.retry_errors:
        ledger.forget_failed()
    errors = ""
    if failed:
        then = "are tried again" if job.retry_errors else "are kept (job.retry_errors=true tries them again)"
        errors = f"; {failed:,} of them are error records, which {then}"
    logger.info("going on after an unfinished run: %s records are whole%s", f"{done:,}", errors)
    return Start(run=journals[-1].run + 1, ledger=ledger)


def _wait_for_writers(files: RunFiles, journals: list[JournalFile]) -> None:
    """Two runs towards one output would answer everything twice."""
    deadline = time.monotonic() + PATIENCE_S
    told = False
    while busy := [journal.path.name for journal in journals if is_being_written(journal.path)]:
        if time.monotonic() > deadline:
            raise ValueError(
                f"output={files.output}: a run that is still alive writes {busy[0]}; stop it first, or give another "
                "output."
            )
        if not told:
            logger.warning("waiting up to %g s for the run that still writes %s", PATIENCE_S, busy[0])
            told = True
        time.sleep(0.1)
