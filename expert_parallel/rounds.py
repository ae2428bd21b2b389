"""Several rounds of dispatch, experts and combine where the rows do not fit one. Knows caps and rows, no transport.

A dispatcher with a row cap takes as many leading rows as fit and says how many it took, and whether any rank has rows
left: the same on all ranks. A rank that has none left dispatches zero rows. One pass where everything fits:

    for rows, inputs in rounds(dispatcher, x_TD, expert_ids_TK, weights_TK):
        out_TD[rows] = dispatcher.combine(experts(inputs), inputs.handle)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from expert_parallel.dispatcher import Dispatcher, ExpertInput, LocalDispatcher
from kernels.gate_few import Undecided
from kernels.pack import Packed

Combine = Literal["exact", "fast"]
"""exact: one unsummed row for each (token, expert) comes home and is summed there in routing order: one rank's bits.
fast: each rank sums what it computed of a token first, then ranks are added; fewer bytes, other bits."""


@dataclass(frozen=True, kw_only=True)
class RoundInput(ExpertInput):
    """The rows of this rank's experts in one round: of the `num_taken` leading rows that this rank brought, and of what
    others did. `more`: some rank has rows left, so all ranks dispatch again."""

    num_taken: int
    more: bool


@dataclass
class Traffic:
    """What one rank sent to others (not to itself), counted on the host: a graph counts once, when it is captured."""

    rounds: int = 0
    records_sent: int = 0
    """Tokens dispatched, each once for every other rank it went to."""
    count_bytes: int = 0
    """What ranks tell each other before the rows."""
    dispatch_bytes: int = 0
    combine_bytes: int = 0


def rounds(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    packed: Packed | Undecided | None = None,
) -> Iterator[tuple[slice, ExpertInput]]:
    """Dispatches x in as many rounds as the ranks need together: the rows each took, and what experts get of it.
    `packed`: for a dispatcher of one rank, which needs one round, what the router packed for its slots or left open.

    What is yielded is combined before the next is asked for. A plain `ExpertInput` holds all rows.
    """
    if packed is not None:
        assert isinstance(dispatcher, LocalDispatcher), "rows were packed for slots of one rank"
        yield slice(0, x_TD.shape[0]), dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK, packed)
        return
    start, more = 0, True
    while more:
        inputs = dispatcher.dispatch(x_TD[start:], expert_ids_TK[start:], weights_TK[start:])
        in_rounds = isinstance(inputs, RoundInput)
        stop = start + inputs.num_taken if in_rounds else x_TD.shape[0]
        yield slice(start, stop), inputs
        start, more = stop, in_rounds and inputs.more
    assert start == x_TD.shape[0], f"the last round ended at row {start} of {x_TD.shape[0]}"


def check_row_cap(row_cap: int | None, num_ranks: int, top_k: int) -> None:
    """A round must have room for one token of every rank, all of whose experts may live on one rank."""
    if row_cap is not None and row_cap < num_ranks * top_k:
        raise ValueError(
            f"parallel.row_cap={row_cap} is less than {num_ranks} ranks x {top_k} experts per token = "
            f"{num_ranks * top_k} rows, which one token of each rank may send to one rank; raise it, or give null."
        )
