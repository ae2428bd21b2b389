"""In which order requests that all have a place begin: those whose answers may be the longest first.

Knows what was asked for and when; knows nothing of blocks or budgets.

The last step is the one that ends the answer which began last and is long. Prompts take many steps to compute, and the
steps at the end hold few rows and take little less time than full ones; so a long answer must not begin late:

    |<-- prompts of all -->|
    | long answer ------------------------------------>|
    |                      | short answer ---->|

An answer's length is not known; what counts is the `max_tokens` that its request asks for.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe.engine.sequence import Sequence

# What an answer that may be of any length counts as.
ANY_LENGTH = 4096


def longest_first(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Those that gave way first, as they are; then by how long they may take, and how many steps they have waited.

    So nobody is overtaken for ever: who comes so many steps later goes first only if it may take longer by more.
    """
    sequences = list(waiting)
    again = [each for each in sequences if each.times_admitted]
    return again + sorted((each for each in sequences if not each.times_admitted), key=_start_by)


def _start_by(sequence: Sequence) -> int:
    bounded = sequence.request.params.max_tokens is not None
    return sequence.arrived_at - (sequence.max_tokens if bounded else ANY_LENGTH)
