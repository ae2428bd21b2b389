"""Modes of torch that the calling thread is in, put aside: what an engine makes and computes follows from its config.

Inference mode around the making of an engine would leave tensors that no later step may write; autocast around a call
would multiply in other numbers, whose keys and values stay in the cache. Knows torch's modes; knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_modes() -> Iterator[None]:
    """Inside, neither inference mode nor autocast is on."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
