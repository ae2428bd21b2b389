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
BOTH_WORK = """
import kernels, {first}
assert kernels.THEIRS == "the other distribution", "ours hides theirs"
import moe, kernels.routing, kernels.theirs, transformers
assert kernels.routing.__file__.startswith({ours!r}), kernels.routing.__file__
assert kernels.theirs.HERE
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
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(dist),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=240)
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
    assert "moe/py.typed" in names and "kernels/__init__.py" not in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/", "docs/"))]


def test_the_wheel_composes_the_config_and_knows_its_version(installed: Path, tmp_path: Path) -> None:
    code = (
        "import moe, launch.generate\n"
        "from moe.version import __version__\n"
        "assert moe.__version__ == __version__\n"
        f"assert moe.__file__.startswith({str(installed)!r}), moe.__file__\n"
        "sys.exit(launch.generate.main(['--cfg', 'job', 'preset=throughput']))"
    )
    done = run(code, tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs: 512" in done.stdout


def test_the_wheel_answers_the_demo(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "In the beginning", "max_tokens": 3}\n')
    words = ["input=in.jsonl", "output=out.jsonl", "engine.device=cpu", "cache.num_blocks=64"]
    done = run(f"import launch.generate; sys.exit(launch.generate.main({words!r}))", tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert '"completion_tokens": 3' in (tmp_path / "out.jsonl").read_text("utf-8")


@pytest.mark.parametrize("first", ["moe", "transformers"])
@pytest.mark.parametrize("theirs_first", [True, False])
def test_the_other_kernels_beside_the_checkout(first: str, theirs_first: bool, tmp_path: Path) -> None:
    other = tmp_path / "site"
    (other / "kernels").mkdir(parents=True)
    (other / "kernels" / "__init__.py").write_text(STAND_IN)
    (other / "kernels" / "theirs.py").write_text("HERE = True\n")
    path = [other, ROOT] if theirs_first else [ROOT, other]
    done = run(BOTH_WORK.format(first=first, ours=str(ROOT)), tmp_path, *path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["moe", "transformers"])
def test_the_other_kernels_in_the_same_site_folder_as_the_wheel(first: str, installed: Path, tmp_path: Path) -> None:
    """Both distributions write into one folder `kernels`; neither has a file of the other's name."""
    site = tmp_path / "site"
    site.mkdir()
    for entry in installed.iterdir():
        if entry.name != "kernels":
            (site / entry.name).symlink_to(entry)
    (site / "kernels").mkdir()
    for entry in (installed / "kernels").iterdir():
        (site / "kernels" / entry.name).symlink_to(entry)
    (site / "kernels" / "__init__.py").write_text(STAND_IN)
    (site / "kernels" / "theirs.py").write_text("HERE = True\n")
    done = run(BOTH_WORK.format(first=first, ours=str(site)), tmp_path, site)
    assert done.returncode == 0, done.stderr
