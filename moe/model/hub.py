"""From what the user calls a model to a folder on this machine: a folder, a shipped demo, or a model of the hub.

Knows names, packages and the Hugging Face hub; knows nothing of what is in the folder. Only safetensors, json and
tokenizer files are fetched, never pickles or code. Processes of one node take turns at a lock: the first fetches, the
others then find everything in the cache. `HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_HOME` are huggingface_hub's own and hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import WeakFileLock

# Shipped with the package; a folder of the same name is reached as ./demo.
DEMOS = {"demo": "mixtral", "demo-deepseek": "deepseek"}
_DEMO_FOLDER = Path(__file__).parent.parent / "demo"

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model")
ALLOWED_FILES = ("*.safetensors", *TOKENIZER_FILES)
DESCRIBING_FILES = ("*.json",)
# Second copies of the weights in other layouts, and anything below the top folder.
IGNORED_FILES = ("consolidated*", "*/*")


def resolve_model(
    model: str, revision: str | None = None, *, cache_dir: Path | None = None, weights: bool = True
) -> Path:
    """The folder that holds `model`: `demo`, `demo-deepseek`, a folder, or a hub id, fetched if need be.

    `revision` is a branch, tag or commit of a hub model. `cache_dir`: instead of huggingface_hub's own.
    `weights`: false fetches no more than what describes a model. ValueError says what `model` was taken for and the way
    out.
    """
    return _resolve("model", model, revision, cache_dir, ALLOWED_FILES if weights else DESCRIBING_FILES)


def resolve_tokenizer(tokenizer: str, *, cache_dir: Path | None = None) -> Path:
    """Likewise, of a model whose tokenizer alone is wanted: of a hub id its weights are not fetched."""
    return _resolve("tokenizer", tokenizer, None, cache_dir, TOKENIZER_FILES)


def _resolve(key: str, name: str, revision: str | None, cache_dir: Path | None, files: Sequence[str]) -> Path:
    if name in DEMOS:
        _refuse_revision(name, revision, "a demo shipped with this package")
        return _demo_folder(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        _refuse_revision(name, revision, "a folder")
        return path
    if name and path.exists():
        raise ValueError(f"{key}={name!r} is a file; give the folder of a checkpoint, in which config.json lies.")
    if not name or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"{key}={name!r}: no such folder; check the path, or give a hub id (owner/name) or demo.")
    return _fetch(key, name, revision, cache_dir, files)


def _demo_folder(model: str) -> Path:
    folder = _DEMO_FOLDER / DEMOS[model]
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model={model!r}: this installation holds no demo checkpoint ({folder} has no config.json); install the "
            "package again, or make it with tools/train_demo.py."
        )
    return folder


def _refuse_revision(model: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ValueError(f"revision={revision!r} belongs to hub models, but model={model!r} is {kind}; drop revision.")


def _fetch(key: str, model: str, revision: str | None, cache_dir: Path | None, files: Sequence[str]) -> Path:
    cache = Path(constants.HF_HUB_CACHE) if cache_dir is None else cache_dir
    try:
        with _fetch_lock(model, cache):
            folder = snapshot_download(
                model,
                revision=revision,
                cache_dir=cache,
                allow_patterns=list(files),
                ignore_patterns=list(IGNORED_FILES),
            )
    except HFValidationError as error:
        raise ValueError(f"{key}={model!r} is neither a folder nor a valid hub id (owner/name): {error}") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{key}={model!r} is gated: accept its terms at {constants.ENDPOINT}/{model}, then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}={model!r} is neither a folder here nor a model you can read at {constants.ENDPOINT}; check the "
            "spelling; for a private model log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{key}={model!r} has no revision={revision!r}; give an existing branch, tag or commit."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(_unreachable(key, model, revision, cache)) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{key}={model!r} could not be fetched from {constants.ENDPOINT}: {error}") from error
    return Path(folder)


def _fetch_lock(model: str, cache: Path) -> AbstractContextManager[object]:
    """Held by the one process of this node that fetches. Offline nothing is written: the cache may be read-only."""
    if constants.HF_HUB_OFFLINE:
        return nullcontext()
    folder = cache / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return WeakFileLock(folder / f"{model.replace('/', '--')}.fetch.lock")


def _unreachable(key: str, model: str, revision: str | None, cache: Path) -> str:
    wanted = f"{key}={model!r}" + (f" revision={revision!r}" if revision else "")
    if constants.HF_HUB_OFFLINE:
        return (
            f"{wanted} is not complete in the cache {cache}, and HF_HUB_OFFLINE forbids fetching it; unset it once "
            "to fetch the model, or give a folder."
        )
    return (
        f"{wanted} is not complete in the cache {cache}, and {constants.ENDPOINT} could not be reached; check the "
        "network, or give a folder."
    )
