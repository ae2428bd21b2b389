"""What a placement does to the evenness of ranks and to the rows on their links, without any GPU.

Knows loads, placements and, where a trace has them, the experts of every token; knows no bytes and no time. A trace is
played look by look: a balancer sees the looks before and is judged by the next one, as in a run.

A token is sent once to each rank that holds one of its experts (as the dispatchers do) and comes back from there.
From counts alone the ranks that it reaches are an expectation, over K independent draws with the ranks' shares as odds:

    a rank of share p is reached with 1 - (1 - p)^K; with even shares a token reaches (N-1) (1 - (1 - 1/N)^K) others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from expert_parallel.balancer import Policy, SlotShape, rank_loads, rebalance
from expert_parallel.moves import moves
from expert_parallel.placement import Placement
from expert_parallel.proposal import next_placements
from expert_parallel.replicas import ReplicaTable

StaticOrPolicy = Literal["static"] | Policy


@dataclass(frozen=True)
class Trace:
    """Rows of each expert in each look, int64 [I, L, E]. `ids_ILTK`: the experts of every token, where known."""

    counts_ILE: np.ndarray
    top_k: int
    ids_ILTK: np.ndarray | None = None

    @classmethod
    def of_tokens(cls, ids_ILTK: np.ndarray, num_experts: int) -> Trace:
        """Counted from the tokens themselves."""
        looks, layers, _, top_k = ids_ILTK.shape
        counts = [[np.bincount(ids_TK.ravel(), minlength=num_experts) for ids_TK in ids_LTK] for ids_LTK in ids_ILTK]
        return cls(np.array(counts, dtype=np.int64).reshape(looks, layers, num_experts), top_k, ids_ILTK)


@dataclass(frozen=True)
class Setting:
    """`policy` static: experts in order, for ever. `adjust`: each placement is made from the one before where that
    is as even, not anew as published. `hindsight`: the balancer knows the look to come."""

    num_ranks: int
    policy: StaticOrPolicy
    redundant: int = 0
    num_nodes: int = 1
    num_groups: int = 1
    window: int = 4
    adjust: bool = True
    hindsight: bool = False

    def shape(self, num_experts: int) -> SlotShape:
        """The slots to fill."""
        return SlotShape.even(
            num_experts, self.num_ranks, self.redundant, num_nodes=self.num_nodes, num_groups=self.num_groups
        )


class Flow(NamedTuple):
    """One layer in one look, per token. load_N: rows that each rank computes. The others: rows that arrive at each rank
    from ranks of its node (near) and of other nodes (far), once per token and rank or once per token and expert.
    nodes_reached: other nodes that a token goes to."""

    load_N: np.ndarray
    near_N: np.ndarray
    far_N: np.ndarray
    near_expert_N: np.ndarray
    far_expert_N: np.ndarray
    nodes_reached: float


def flow_of_counts(counts_E: np.ndarray, placement: Placement, top_k: int, num_nodes: int = 1) -> Flow:
    """Expected, from how often each expert was used; sources are even, replicas share evenly."""
    num_ranks = placement.num_ranks
    near, far = num_ranks // num_nodes - 1, num_ranks - num_ranks // num_nodes
    share_N = rank_loads(counts_E[None], [placement])[0] / counts_E.sum()
    reached_N = 1 - (1 - share_N) ** top_k
    node_share = share_N.reshape(num_nodes, -1).sum(axis=1)
    nodes = (1 - (1 - node_share) ** top_k).sum() * (num_nodes - 1) / num_nodes
    return Flow(
        load_N=top_k * share_N,
        near_N=near / num_ranks * reached_N,
        far_N=far / num_ranks * reached_N,
        near_expert_N=near / num_ranks * top_k * share_N,
        far_expert_N=far / num_ranks * top_k * share_N,
        nodes_reached=float(nodes),
    )


def flow_of_tokens(ids_TK: np.ndarray, placement: Placement, table: ReplicaTable, num_nodes: int = 1) -> Flow:
    """Counted: token t is the (t // N)-th of source rank t % N and goes where the replica table sends it."""
    num_tokens, num_ranks = len(ids_TK), placement.num_ranks
    per_node = num_ranks // num_nodes
    token_T = np.arange(num_tokens)
    source_T1 = (token_T % num_ranks)[:, None]
    turn_T = torch.from_numpy(token_T % num_ranks + token_T // num_ranks)
    target_TK = table.choose_in_turn(torch.from_numpy(ids_TK), turn_T)[0].numpy()
    target_TK = np.sort(target_TK, axis=1)
    first_TK = _first_of_equals(target_TK)
    node_TK = target_TK // per_node  # sorted, as the ranks are
    is_near_TK = (target_TK != source_T1) & (node_TK == source_T1 // per_node)
    is_far_TK = node_TK != source_T1 // per_node

    def arriving(chosen_TK: np.ndarray) -> np.ndarray:
        return np.bincount(target_TK[chosen_TK], minlength=num_ranks) / num_tokens

    return Flow(
        load_N=np.bincount(target_TK.ravel(), minlength=num_ranks) / num_tokens,
        near_N=arriving(is_near_TK & first_TK),
        far_N=arriving(is_far_TK & first_TK),
        near_expert_N=arriving(is_near_TK),
        far_expert_N=arriving(is_far_TK),
        nodes_reached=float((_first_of_equals(node_TK) & is_far_TK).sum() / num_tokens),
    )


def _first_of_equals(sorted_TK: np.ndarray) -> np.ndarray:
    first_TK = np.ones(sorted_TK.shape, dtype=bool)
    first_TK[:, 1:] = sorted_TK[:, 1:] != sorted_TK[:, :-1]
    return first_TK


@dataclass(frozen=True)
class Outcome:
    """Averages over looks and layers. `worst`: the least even (look, layer). `heaviest`: max over mean of the ranks.

    Rows are those of the busiest rank, per token that an average rank sends: times its tokens and the bytes of a row
    they are a link's bytes. `moves`: copies of a layer in one rebalance. balancedness_I: by look.
    """

    setting: Setting
    balancedness: float
    worst: float
    heaviest: float
    ranks_reached: float
    nodes_reached: float
    near_rows: float
    far_rows: float
    near_expert_rows: float
    far_expert_rows: float
    moves: float
    balancedness_I: tuple[float, ...]


def play(trace: Trace, setting: Setting) -> Outcome:
    """Rebalance before every look from the `window` looks before it, and judge by the look. The first is only seen."""
    num_looks, num_layers, num_experts = trace.counts_ILE.shape
    if num_looks < 2:
        raise ValueError(f"a trace of {num_looks} looks cannot be played; it takes one to see and one to be judged by.")
    shape = setting.shape(num_experts)
    placements = (Placement.contiguous(num_experts, setting.num_ranks, setting.redundant),) * num_layers
    flows_IL: list[list[Flow]] = []
    num_moves = 0
    for look in range(1, num_looks):
        if setting.policy != "static":
            start = max(0, look - setting.window)
            seen_ILE = trace.counts_ILE[look : look + 1] if setting.hindsight else trace.counts_ILE[start:look]
            loads_LE = seen_ILE.sum(axis=0)
            # The first one is made from nothing, and its moves do not count: no run begins with it.
            if setting.adjust and look > 1:
                wanted = next_placements(loads_LE, placements, shape, policy=setting.policy)
            else:
                wanted = rebalance(loads_LE, shape, policy=setting.policy)
            if look > 1:
                num_moves += sum(len(moves(*pair)) for pair in zip(placements, wanted, strict=True))
            placements = wanted
        flows_IL.append(_flows(trace, look, placements, setting.num_nodes))
    return _outcome(setting, flows_IL, num_moves / max(1, (num_looks - 2) * num_layers))


def _flows(trace: Trace, look: int, placements: Sequence[Placement], num_nodes: int) -> list[Flow]:
    """Every layer that saw rows in this look."""
    flows = []
    for layer, placement in enumerate(placements):
        counts_E = trace.counts_ILE[look, layer]
        if not counts_E.any():
            continue
        if trace.ids_ILTK is None:
            flows.append(flow_of_counts(counts_E, placement, trace.top_k, num_nodes))
        else:
            table = ReplicaTable(placement, width=placement.num_ranks, device="cpu")
            flows.append(flow_of_tokens(trace.ids_ILTK[look, layer], placement, table, num_nodes))
    return flows


def _outcome(setting: Setting, flows_IL: list[list[Flow]], num_moves: float) -> Outcome:
    flows = [flow for of_look in flows_IL for flow in of_look]
    if not flows:
        raise ValueError("the trace holds no rows after its first look; record a longer run.")

    def even(flow: Flow) -> float:
        return float(flow.load_N.mean() / flow.load_N.max())

    def busiest(name: str) -> float:
        return float(np.mean([getattr(flow, name).max() for flow in flows])) * setting.num_ranks

    return Outcome(
        setting=setting,
        balancedness=float(np.mean([even(flow) for flow in flows])),
        worst=min(even(flow) for flow in flows),
        heaviest=float(np.mean([1 / even(flow) for flow in flows])),
        ranks_reached=float(np.mean([(flow.near_N + flow.far_N).sum() for flow in flows])),
        nodes_reached=float(np.mean([flow.nodes_reached for flow in flows])),
        near_rows=busiest("near_N"),
        far_rows=busiest("far_N"),
        near_expert_rows=busiest("near_expert_N"),
        far_expert_rows=busiest("far_expert_N"),
        moves=num_moves,
        balancedness_I=tuple(float(np.mean([even(flow) for flow in of_look])) for of_look in flows_IL if of_look),
    )
