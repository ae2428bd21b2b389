"""Ctrl-C while the engine works: kept until what was begun is done, for the books of half a step do not add up.

Knows signals; knows nothing of steps or requests.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_until_done() -> Iterator[None]:
    """Inside, the first Ctrl-C waits for the end of the block; then whoever handles it hears of it, which raises
    KeyboardInterrupt as a rule. A second one is heard at once, and takes what else is being answered with it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # nothing in Python would be called, or not here
        return
    kept: list[FrameType | None] = []

    def keep(_: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, handler)
        kept.append(frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if kept:
            handler(signal.SIGINT, kept[0])
