"""Placements of all layers as a file: made by a profiling run, loaded and kept by another (`balance.plan=FILE`).

Knows JSON and placements. The file carries the shape of the model that it was made for; another model's is refused.

    {"format": "sortyard-expert-plan", "version": 1,
     "model": {"num_layers": 3, "num_experts": 4, "sparse_layers": [1, 2]},
     "source": "64 steps of profile", "ranks": 2,
     "layers": {"1": [[0, 1, 2], [3, 0, null]], "2": [[0, 1, 3], [2, 3, null]]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expert_parallel.placement import Placement

FORMAT = "sortyard-expert-plan"
VERSION = 1


@dataclass(frozen=True)
class ModelShape:
    """What a plan must agree with: layers of the network, experts of a layer, and which layers have experts."""

    num_layers: int
    num_experts: int
    sparse_layers: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"sparse_layers": list(self.sparse_layers)}


def plan_text(model: ModelShape, placements: Mapping[int, Placement], source: str) -> str:
    """The file's content: the placements of the sparse layers, by layer index."""
    assert tuple(sorted(placements)) == model.sparse_layers, (
        f"placements of layers {sorted(placements)}, sparse layers are {model.sparse_layers}"
    )
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": model.as_dict(),
        "source": source,
        "ranks": placements[model.sparse_layers[0]].num_ranks,
    }
    # One line a layer: a person can compare two files.
    layers = ",\n".join(
        f'  "{layer}": {json.dumps([list(slots) for slots in placements[layer].ranks])}'
        for layer in model.sparse_layers
    )
    return f'{json.dumps(head)[:-1]},\n "layers": {{\n{layers}\n }}\n}}\n'


def load_plan(path: Path, model: ModelShape, num_ranks: int) -> dict[int, Placement]:
    """The placement of every sparse layer. ValueError where the file is none, of another model, or for other ranks."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refusal(path, f"cannot be read ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _refusal(path, f"is no expert plan (its format is not {FORMAT!r})")
    if record.get("version") != VERSION:
        raise _refusal(path, f"has version {record.get('version')}, this code reads {VERSION}")
    if differing := _differences(record.get("model"), model):
        raise _refusal(path, f"is of another model: {'; '.join(differing)}")
    if record.get("ranks") != num_ranks:
        raise _refusal(path, f"is for {record.get('ranks')} ranks, this run has {num_ranks}")
    layers = record.get("layers")
    if not isinstance(layers, dict) or set(layers) != {str(layer) for layer in model.sparse_layers}:
        raise _refusal(path, f"does not hold exactly the layers {list(model.sparse_layers)}")
    placements = {}
    for layer in model.sparse_layers:
        try:
            placements[layer] = _placement(layers[str(layer)], model.num_experts, num_ranks)
        except ValueError as error:
            raise _refusal(path, f"is damaged in layer {layer} ({str(error).rstrip('.')})") from None
    if len({tuple(len(slots) for slots in placement.ranks) for placement in placements.values()}) > 1:
        raise _refusal(path, "gives ranks other numbers of slots in one layer than in another")
    return placements


def _refusal(path: Path, what: str) -> ValueError:
    return ValueError(
        f"balance.plan={path} {what}; make a plan of this model on as many ranks with balance.profile, "
        "or leave balance.plan out."
    )


def _differences(theirs: Any, model: ModelShape) -> list[str]:
    """What the plan says of its model and ours is not."""
    theirs = theirs if isinstance(theirs, dict) else {}
    return [
        f"{name} {theirs.get(name)} in the plan, {own} here"
        for name, own in model.as_dict().items()
        if theirs.get(name) != own
    ]


def _placement(ranks: Any, num_experts: int, num_ranks: int) -> Placement:
    """One layer's table, checked."""
    if not (
        isinstance(ranks, list)
        and len(ranks) == num_ranks
        and all(isinstance(slots, list) and all(e is None or type(e) is int for e in slots) for slots in ranks)
    ):
        raise ValueError(f"it is no list of {num_ranks} lists of expert numbers.")
    return Placement.of_ranks(num_experts, ranks)
