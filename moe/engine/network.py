"""What the engine asks of a model. Knows no implementation of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kv_cache.layout import LayerCache
from moe.model.step_input import StepInput
from router.load import LoadCounter


class Network(Protocol):
    """`forward`: fp32 logits [B', V] of the rows `step.logits_rows_B`. `targets`: all parameters by name.

    `load`: where `forward` counts the rows of each expert; None counts nothing. The engine sets one if none is.
    """

    load: LoadCounter | None

    def forward(self, step: StepInput, kv_caches: Sequence[LayerCache]) -> Tensor: ...

    def targets(self) -> dict[str, Tensor]: ...
