"""The wheel holds everything, runs away from the checkout, and lives beside another distribution named `kernels`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What stands in for Hugging Face's distribution of that name: a regular package with files of its own.
STAND_IN = 'THEIRS = "the other distribution"\n'
# Each case is a fork of one process that has paid for the third parties' imports. `kernels` first is what transformers
# does where the other distribution is installed.
BOTH_WORK = """
import importlib, os, sys, traceback
import hydra, tokenizers, torch, transformers, triton
for name, first, path, ours in {cases!r}:
    assert not [module for module in sys.modules if module.split(".")[0] in ("kernels", "moe", "router")]
    if os.fork() == 0:
        try:
            sys.path[:0] = path
            importlib.import_module(first)
            import kernels
            assert kernels.THEIRS == "the other distribution", "ours hides theirs"
            import moe, kernels.routing, kernels.theirs
            assert kernels.routing.__file__.startswith(ours), kernels.routing.__file__
            assert moe.__file__.startswith(ours) and kernels.theirs.HERE
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(name, "works" if os.wait()[1] == 0 else "fails", flush=True)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the committed sources without any network."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(source)]
    done = subprocess.run(command, cwd=dist, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = dist.glob("sortyard-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked into a folder, as an installer does."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(code: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Python code in `folder`, importing from the given folders before the environment's own."""
    # -P keeps the current folder off the path: what is found comes from where the test says.
    setup = f"import sys; sys.path[:0] = {[str(each) for each in path]!r}\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", setup + code], cwd=folder, capture_output=True, text=True, timeout=240
    )


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("moe/demo/*/*"), ROOT / "moe/demo/prompts.jsonl"]:
        assert str(path.relative_to(ROOT)) in names, path
    for layer in ("configs", "router", "kv_cache", "expert_parallel", "kernels", "launch", "moe"):
        for path in (ROOT / layer).rglob("*.py"):
            assert str(path.relative_to(ROOT)) in names, path
    assert {f"launch/{name}.sh" for name in ("one_node", "several_nodes", "slurm")} <= names
    assert "moe/py.typed" in names and "kernels/__init__.py" not in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/", "docs/"))]


def test_the_wheel_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    """Its YAML files compose, its version is known, its demo model answers."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "In the beginning", "max_tokens": 3}\n')
    words = ["input=in.jsonl", "output=out.jsonl", "engine.device=cpu", "cache.num_blocks=64"]
    code = (
        "import moe, launch.generate\n"
        "from moe.version import __version__\n"
        "assert moe.__version__ == __version__\n"
        f"assert moe.__file__.startswith({str(installed)!r}), moe.__file__\n"
        "assert launch.generate.main(['--cfg', 'job', 'preset=throughput']) == 0\n"
        f"sys.exit(launch.generate.main({words!r}))"
    )
    done = run(code, tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs: 1024" in done.stdout
    assert '"completion_tokens":3' in (tmp_path / "out.jsonl").read_text("utf-8")


def test_both_distributions_named_kernels_work(installed: Path, tmp_path: Path) -> None:
    """Beside the checkout, found before or after it, and in one folder with the wheel; whichever is imported first."""
    beside = tmp_path / "beside"
    write_stand_in(beside / "kernels")
    # Both distributions write into one folder `kernels`; neither has a file of the other's name.
    together = tmp_path / "together"
    write_stand_in(together / "kernels")
    for entry in installed.iterdir():
        if entry.name != "kernels":
            (together / entry.name).symlink_to(entry)
    for entry in (installed / "kernels").iterdir():
        (together / "kernels" / entry.name).symlink_to(entry)
    cases = []
    for first in ("kernels", "moe"):
        cases.append((f"{first}-theirs-then-checkout", first, [str(beside), str(ROOT)], str(ROOT)))
        cases.append((f"{first}-checkout-then-theirs", first, [str(ROOT), str(beside)], str(ROOT)))
        cases.append((f"{first}-wheel-in-one-folder", first, [str(together)], str(together)))
    done = run(BOTH_WORK.format(cases=cases), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{case[0]} works" for case in cases], done.stderr


def write_stand_in(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(STAND_IN)
    (folder / "theirs.py").write_text("HERE = True\n")
