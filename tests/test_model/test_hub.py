"""Where a model string leads, and what the user is told when it leads nowhere. The hub is a stand-in: no network."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import Timeout
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from moe.model import hub
from moe.model.hub import ALLOWED_FILES, IGNORED_FILES, resolve_model, resolve_tokenizer


class FakeHub:
    """Stands in for snapshot_download: records the call, then returns a folder or raises."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder = folder
        self.error = error
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append((repo_id, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return fake


def _http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://hub.example/api/models/owner/name")
    return kind("the hub said no", response=httpx.Response(status, request=request))


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path, fake_hub: FakeHub):
    assert resolve_model(str(tmp_path)) == tmp_path
    assert not fake_hub.calls


def test_the_demos_are_folders_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_hub: FakeHub):
    monkeypatch.setattr(hub, "_DEMO_FOLDER", tmp_path)
    for model, folder in (("demo", "mixtral"), ("demo-deepseek", "deepseek")):
        (tmp_path / folder).mkdir()
        with pytest.raises(ValueError, match="holds no demo checkpoint"):
            resolve_model(model)
        (tmp_path / folder / "config.json").write_text("{}")
        assert resolve_model(model) == tmp_path / folder
    assert not fake_hub.calls


def test_a_hub_id_is_fetched_with_its_revision_and_safe_files_only(tmp_path: Path, fake_hub: FakeHub):
    assert resolve_model("owner/name", "v1", cache_dir=tmp_path) == fake_hub.folder
    [(repo_id, options)] = fake_hub.calls
    assert repo_id == "owner/name" and options["revision"] == "v1" and options["cache_dir"] == tmp_path

    def fetched(file: str) -> bool:
        allowed = any(fnmatch.fnmatch(file, pattern) for pattern in options["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(file, pattern) for pattern in options["ignore_patterns"])

    wanted = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"]
    wanted += ["generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"]
    unwanted = ["pytorch_model.bin", "modeling_deepseek.py", "consolidated.safetensors", "original/model.safetensors"]
    unwanted += ["model.gguf", "consolidated.00.pth", "figures/benchmark.png", "README.md"]
    assert [file for file in wanted if not fetched(file)] == []
    assert [file for file in unwanted if fetched(file)] == []
    assert options["allow_patterns"] == list(ALLOWED_FILES) and options["ignore_patterns"] == list(IGNORED_FILES)


def test_processes_of_one_node_fetch_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_hub: FakeHub):
    held: list[str] = []
    real_lock = hub.WeakFileLock

    def fetch_under_lock(repo_id: str, **options: Any) -> str:
        with pytest.raises(Timeout), real_lock(tmp_path / ".locks" / "owner--name.fetch.lock", timeout=0.01):
            held.append("a second process got the lock as well")
        return fake_hub(repo_id, **options)

    monkeypatch.setattr(hub, "snapshot_download", fetch_under_lock)
    resolve_model("owner/name", cache_dir=tmp_path)
    assert fake_hub.calls and not held
    with real_lock(tmp_path / ".locks" / "owner--name.fetch.lock", timeout=1):
        held.append("free again")
    assert held == ["free again"]


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "~/missing-model", "a/b/c", "../up", ""])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(model: str, fake_hub: FakeHub):
    with pytest.raises(ValueError, match="no such folder"):
        resolve_model(model)
    assert not fake_hub.calls


def test_a_file_is_not_a_model(tmp_path: Path, fake_hub: FakeHub):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; give the folder"):
        resolve_model(str(file))


def test_of_a_tokenizer_no_weights_are_fetched_and_its_own_key_is_named(tmp_path: Path, fake_hub: FakeHub):
    assert resolve_tokenizer("owner/name", cache_dir=tmp_path) == fake_hub.folder
    assert fake_hub.calls[0][1]["allow_patterns"] == [name for name in ALLOWED_FILES if name != "*.safetensors"]
    fake_hub.error = LocalEntryNotFoundError("nothing cached")
    for tokenizer in ("owner/name", "./missing"):
        with pytest.raises(ValueError, match=f"^tokenizer='{tokenizer}'"):
            resolve_tokenizer(tokenizer, cache_dir=tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ValueError, match=r"^tokenizer='.*' is a file; give the folder of a checkpoint"):
        resolve_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_revision_belongs_to_hub_models_only(tmp_path: Path, fake_hub: FakeHub):
    for model in (str(tmp_path), "demo"):
        with pytest.raises(ValueError, match="revision='main' belongs to hub models"):
            resolve_model(model, "main")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_http_error(GatedRepoError, 403), "is gated: accept its terms at .*/owner/name, then log in with `hf auth"),
        (_http_error(RepositoryNotFoundError, 401), "neither a folder here nor a model you can read.*HF_TOKEN"),
        (_http_error(RevisionNotFoundError, 404), "has no revision='v9'"),
        (_http_error(HfHubHTTPError, 503), "could not be fetched from .*the hub said no"),
        (LocalEntryNotFoundError("nothing cached"), "could not be reached; check the network"),
    ],
)
def test_a_refusal_of_the_hub_says_the_way_out(tmp_path: Path, fake_hub: FakeHub, error: Exception, said: str):
    fake_hub.error = error
    with pytest.raises(ValueError, match=said) as caught:
        resolve_model("owner/name", "v9", cache_dir=tmp_path)
    assert "model='owner/name'" in str(caught.value)


def test_offline_mode_is_respected_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real client with an empty cache and no network: nothing is written, the text names the switch."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids fetching it"):
        resolve_model("owner/name", cache_dir=cache)
    assert not cache.exists()


def test_a_string_that_is_no_hub_id_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match="neither a folder nor a valid hub id"):
        resolve_model("not an id", cache_dir=tmp_path)
