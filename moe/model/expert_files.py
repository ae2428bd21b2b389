"""One expert's bundle at a time, read from a checkpoint's files when it is asked for. Knows rules and names on disk.

What a bundle's bytes are is the loader's own business (checkpoint.py): the same numbers as if all were loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from moe.model.checkpoint import Checkpoint, Readers
from moe.model.families.weight_rule import WeightRule
from moe.model.fill_count import FillCount
from moe.model.parameter_shapes import bundle_names, is_expert_parameter, parameter_shapes
from moe.model.slot_experts import Places


class ExpertFiles:
    """Call it with a layer, a logical expert and a row of each tensor of the bundle, from any thread. fp8 weights are
    computed on `device`."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.device = device
        specs = parameter_shapes(checkpoint.config, 1)
        self._names = {layer: bundle_names(layer, specs) for layer in checkpoint.config.layers_with_experts}
        self._rules: dict[tuple[int, int | None], list[WeightRule]] = {}  # by layer and expert; stacked ones by None
        for rule in checkpoint.rules:
            if is_expert_parameter(rule.target):
                self._rules.setdefault((int(rule.target.split(".")[1]), rule.expert), []).append(rule)
        self._of_thread = threading.local()  # files that are open

    def __call__(self, layer: int, expert: int, rows: Sequence[Tensor]) -> None:
        targets = {name: row[None] for name, row in zip(self._names[layer], rows, strict=True)}
        places = Places({layer: (expert,)})
        count = FillCount(targets, places.filled)
        for rule in self._rules.get((layer, expert), []) + self._rules.get((layer, None), []):
            self.checkpoint.load_rule(rule, self._readers(), targets, places, count, self.device)
        count.check()

    def _readers(self) -> Readers:
        if not hasattr(self._of_thread, "readers"):
            self._of_thread.readers = Readers(self.checkpoint.files)
        return self._of_thread.readers
