"""Whether a change of kernels changed what they are compiled to: the ahead-of-time tests' PTX, saved and compared.

    python tools/compiled_code.py save /tmp/before tests/test_kernels -n 2        # in the tree as it was
    python tools/compiled_code.py save /tmp/after tests/test_kernels -n 2
    python tools/compiled_code.py compare /tmp/before /tmp/after                  # exit status 1 where any differs

A kernel can so be taken apart and put together anew where there is no GPU: the same PTX is the same machine code. Words
after the folder are pytest's. Names of kernels, lines and comments do not count; what shared memory and warps a kernel
takes does. Knows the two compile functions of tests/ by the one of Triton that both call; runs nothing on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = "COMPILED_CODE_FOLDER"  # how worker processes of pytest are told


def bare(ptx: str, name: str) -> str:
    """Without the kernel's name and what is there for debuggers."""
    lines: list[str] = []
    in_section = False
    for line in ptx.splitlines():
        code = line.split("//")[0].rstrip()
        in_section |= code.startswith("\t.section")
        if in_section:
            in_section = code.strip() != "}"
        elif code and not re.match(r"\s*\.(loc|file)\b|\$L__(tmp|func_begin|func_end|info)\w*:", code):
            lines.append(code.replace(", debug", ""))
    return re.sub(rf"\b{re.escape(name)}(?=\b|_param_)", "KERNEL", "\n".join(lines))


class Saver:
    """Wraps `triton.compile`: a file for each call, named after its test and its turn there."""

    def __init__(self, folder: Path) -> None:
        import triton  # the process that only tells pytest what to do needs none
        from triton.backends.nvidia.compiler import CUDABackend

        self.folder = folder
        self.turns: dict[str, int] = {}
        self.compile: Any = triton.compile
        triton.compile = self.compile_and_save
        backend: Any = CUDABackend
        backend.make_cubin = lambda *_: b"-"  # the machine code follows from the PTX

    def compile_and_save(self, source: Any, *words: Any, **options: Any) -> Any:
        compiled = self.compile(source, *words, **options)
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        turn = self.turns[test] = self.turns.get(test, -1) + 1
        code = bare(compiled.asm["ptx"], compiled.metadata.name)
        record = {
            "call": f"{test} #{turn}",
            "kernel": compiled.metadata.name,
            "code": hashlib.sha256(code.encode()).hexdigest(),
            "shared": compiled.metadata.shared,
            "num_warps": compiled.metadata.num_warps,
        }
        name = hashlib.sha256(record["call"].encode()).hexdigest()[:24]
        (self.folder / f"{name}.json").write_text(json.dumps(record), "utf-8")
        (self.folder / f"{name}.ptx").write_text(code, "utf-8")
        return compiled


def pytest_configure() -> None:
    """This file is pytest's plugin, in every worker process."""
    Saver(Path(os.environ[_FOLDER]))


def compare(before: Path, after: Path) -> int:
    """0 where all that both have is the same."""
    first, second = (
        {record["call"]: record for record in (json.loads(path.read_text("utf-8")) for path in folder.glob("*.json"))}
        for folder in (before, after)
    )
    both = sorted(first.keys() & second.keys())
    compiled = ("code", "shared", "num_warps")
    changed = [call for call in both if any(first[call][what] != second[call][what] for what in compiled)]
    for call in changed:
        print(f"changed: {second[call]['kernel']}: {call}")
    only = {str(before): first.keys() - second.keys(), str(after): second.keys() - first.keys()}
    for folder, calls in only.items():
        for call in sorted(calls):
            print(f"only in {folder}: {call}")
    print(f"{len(both) - len(changed)} of {len(both)} calls are compiled to the same code")
    return 1 if changed or not both else 0


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) == 3 and words[0] == "compare":
        return compare(Path(words[1]), Path(words[2]))
    if len(words) >= 2 and words[0] == "save":
        folder = Path(words[1]).resolve()
        folder.mkdir(parents=True)  # an older one would mix
        os.environ |= {_FOLDER: str(folder), "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DISABLE_LINE_INFO": "1"}
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        sys.path.insert(0, str(ROOT))
        return int(pytest.main(["-p", "tools.compiled_code", "-q", *words[2:]]))
    print((__doc__ or "").partition("\n\n")[2], file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
