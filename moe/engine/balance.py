"""Looks at the experts' load while a job runs, and moves experts between its steps so that ranks carry even loads.

Knows when to look, what to ask and in which order; the decision is `expert_parallel/proposal.py`'s, the moving
`expert_parallel/rebalance.py`'s. All of it hangs on the number of the step alone, which all ranks count alike, so that
their collectives come in one order:

    every balance.interval steps     counters of all ranks are added up: one look (router/load_window.py)
    then, between two steps each     balance.layers_per_step layers are asked about, and moved where it pays

A step that is on its way is not waited for by the host more than it must: moving comes behind it on the device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

from configs.checks import file_to_write
from configs.schema import BalanceConfig
from expert_parallel.balancer import SlotShape
from expert_parallel.group import ExpertGroup, Ranks
from expert_parallel.layout import ExpertLayout
from expert_parallel.placement import Placement
from expert_parallel.plan_file import plan_text
from expert_parallel.proposal import next_placements, propose
from expert_parallel.rebalance import Bundles, ExpertMover, mover_bytes, records_within
from moe.engine.balance_rates import MeasuredRates
from moe.engine.network import Network
from moe.engine.whole_file import write_whole
from moe.model.causal_lm import CausalLM
from moe.model.config import ModelConfig
from moe.model.layer import MoELayer
from moe.model.load_model import model_shape
from moe.model.parameter_shapes import bundle_names
from router.load import LoadCounter
from router.load_window import LoadWindow

logger = logging.getLogger(__name__)

MIB = 2**20


def layer_bundles(network: CausalLM) -> dict[int, Bundles]:
    """All that the expert slots of each layer hold here."""
    if network.offload is not None and network.offload.host.by_table:
        return {}  # experts move in tables alone
    targets = network.targets()
    layers = network.layout.placements
    return {layer: Bundles([targets[name] for name in bundle_names(layer, targets)]) for layer in layers}


def check_files(balance: BalanceConfig) -> None:
    """ValueError where a file that will be written at some later step could not be."""
    for key in ("profile", "load_file"):
        if (path := getattr(balance, key)) is not None:
            file_to_write(f"balance.{key}", path)


def _write(key: str, path: str, text: str, what: str) -> None:
    """A disk that is full by then is a warning: the answers matter more, and other ranks go on."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        logger.warning("balance.%s=%s is not written: %s.", key, path, error.strerror or error)
    else:
        logger.info("%s: %s", what, path)


def may_move(balance: BalanceConfig, num_ranks: int) -> bool:
    """Whether experts change places while steps go on."""
    return num_ranks > 1 and balance.interval > 0 and balance.move != "never" and balance.plan is None


def moving_bytes(balance: BalanceConfig, placement: Placement, bundle_bytes: int) -> int:
    """What `make_mover` will take, before there is a network."""
    if not may_move(balance, placement.num_ranks):
        return 0
    return mover_bytes(bundle_bytes, _most_records(balance, placement, bundle_bytes))


def _most_records(balance: BalanceConfig, placement: Placement, bundle_bytes: int) -> int:
    return records_within(int(balance.buffer_mb * MIB), bundle_bytes, max(len(held) for held in placement.ranks))


def make_mover(balance: BalanceConfig, network: Network, ranks: Ranks | None) -> ExpertMover | None:
    """What moves experts, with its memory; None where they stay."""
    if ranks is None or not isinstance(network, CausalLM) or not network.layout.replicas:
        return None
    if not may_move(balance, ranks.everyone.size):
        return None
    if network.offload is not None:
        bundle_bytes = network.offload.bundle_bytes
    else:
        bundle_bytes = next(iter(layer_bundles(network).values())).num_bytes
    most = _most_records(balance, next(iter(network.layout.placements.values())), bundle_bytes)
    return ExpertMover(ranks.everyone, bundle_bytes, most, network.device, num_nodes=num_nodes(ranks))


def num_nodes(ranks: Ranks) -> int:
    """Machines, where each holds as many ranks; else 1: then no link is known to be faster than another."""
    size, on_each = ranks.everyone.size, ranks.values.local_world_size
    return size // on_each if size % on_each == 0 else 1


class Balance:
    """The load of one engine's experts and their places. Ranks make the same calls, in step.

    `experts_moved` counts arrivals here, `seconds` all that looking and moving took of the steps' time.
    """

    def __init__(
        self,
        balance: BalanceConfig,
        network: Network,
        model: ModelConfig,
        load: LoadCounter,
        ranks: Ranks | None,
        mover: ExpertMover | None,
    ) -> None:
        self.balance = balance
        self.model = model
        self.load = load
        self.group: ExpertGroup | None = ranks.everyone if ranks is not None and ranks.everyone.size > 1 else None
        self.window = LoadWindow(model.num_layers, model.moe.num_experts, balance.window)
        self.num_steps = 0
        self.num_rebalances = 0
        self.experts_moved = 0
        self.seconds = 0.0
        self.layout: ExpertLayout | None = network.layout if isinstance(network, CausalLM) else None
        self._offload = network.offload if isinstance(network, CausalLM) else None
        self._own_L = np.zeros(model.num_layers, dtype=np.int64)
        self._looked_at: deque[int] = deque([0], maxlen=balance.window + 1)  # steps of the window's looks, one before
        self._due: deque[int] = deque()  # layers to ask about, once each after a look
        self._moved_in_pass = 0
        self._profile_due = balance.profile is not None
        self._mover = mover
        self._rates: MeasuredRates | None = None
        self._bundles: dict[int, Bundles] = {}
        if self.layout is not None and self.group is not None and ranks is not None:
            slots = tuple(len(held) for held in next(iter(self.layout.placements.values())).ranks)
            self._shape = SlotShape(
                model.moe.num_experts, slots, num_nodes=num_nodes(ranks), num_groups=model.moe.rule.num_groups
            )
        if mover is not None:
            assert isinstance(network, CausalLM) and self.group is not None, "experts move within one network's ranks"
            self._bundles = layer_bundles(network)
            experts = next(block.mlp.experts for block in network.blocks if isinstance(block.mlp, MoELayer))
            width, num_slots = model.hidden_size, network.layout.num_slots
            self._rates = MeasuredRates(
                *(self.group, mover, experts, num_slots), width=width, dtype=network.dtype, device=network.device
            )

    def before_step(self) -> None:
        """Every rank calls it before each step that any rank has rows in."""
        begin = time.perf_counter()
        if self.balance.interval and self.num_steps and self.num_steps % self.balance.interval == 0:
            self._look()
            if self._mover is not None and not self._due and self.layout is not None:
                self._due.extend(self.layout.placements)
        if self._profile_due and self.num_steps == self.balance.profile_steps:
            self._write_profile()
        if self._due:
            self._rebalance([self._due.popleft() for _ in range(min(self.balance.layers_per_step, len(self._due)))])
        self.num_steps += 1
        self.seconds += time.perf_counter() - begin

    def conclude(self) -> None:
        """Every rank calls it once all steps are done: the last look, and the files that were asked for."""
        if self.balance.load_file is None and not self._profile_due:
            return
        if self._looked_at[-1] != self.num_steps:
            self._look()
        if self._profile_due:
            self._write_profile()
        if self.balance.load_file is not None and self._is_first:
            _write(
                "load_file",
                self.balance.load_file,
                self.window.as_text(),
                f"the experts' load of {self.num_steps} steps",
            )

    @property
    def _is_first(self) -> bool:
        return self.group is None or self.group.rank == 0

    def _look(self) -> None:
        """Counters of all ranks, and the rows that each rank had since the last look. Waits for the device."""
        counts_LE = self.load.snapshot()
        self._looked_at.append(self.num_steps)
        if self.group is None:
            self.window.push(self.num_steps, counts_LE.numpy())
            return
        new_L = counts_LE.sum(dim=1).numpy() - self._own_L
        self._own_L += new_L
        rows_LN = torch.zeros((counts_LE.shape[0], self.group.size), dtype=torch.int64)
        rows_LN[:, self.group.rank] = torch.from_numpy(new_L)
        together_X = torch.cat([counts_LE.flatten(), rows_LN.flatten()])
        self.group.add_up(together_X)
        counts, rows = together_X.split([counts_LE.numel(), rows_LN.numel()])
        self.window.push(self.num_steps, counts.view_as(counts_LE).numpy(), rows.view_as(rows_LN).numpy())

    def _rebalance(self, layers: list[int]) -> None:
        """Ask about some layers, with the loads of the window, and move their experts where that is worth it."""
        assert self.layout is not None and self._mover is not None, "layers are due where experts can move"
        steps = self._looked_at[-1] - self._looked_at[0]
        loads_LE = self.window.recent_LE()[layers] / steps
        current = [self.layout.placements[layer] for layer in layers]
        wanted = self._wanted(loads_LE, current)
        for layer, now, then in zip(layers, current, wanted, strict=True):
            if now != then:
                self._move(layer, then)
        if not self._due and self._moved_in_pass:
            self.num_rebalances += 1
            if self._is_first:
                even = self.window.timeline[-1].balancedness
                text = "step %d: experts moved in %d layers; balancedness of the ranks before it %.2f"
                logger.info(text, self.num_steps, self._moved_in_pass, even)
            self._moved_in_pass = 0

    def _wanted(self, loads_LE: np.ndarray, current: list[Placement]) -> tuple[Placement, ...]:
        if self.balance.move == "always":
            return next_placements(loads_LE, current, self._shape)
        assert self._rates is not None, "rates are measured where experts can move"
        num_layers = len(self.layout.placements) if self.layout is not None else 1
        rows_per_rank = float(self.window.recent_LE().sum()) / num_layers / self._shape.num_ranks
        steps = self._looked_at[-1] - self._looked_at[0]
        # As long as the window looks back the new placement is taken to serve.
        rates = self._rates.rates(rows_per_rank / steps, self.balance.interval * self.balance.window)
        return propose(loads_LE, current, self._shape, rates).placements

    def _move(self, layer: int, wanted: Placement) -> None:
        """All that is indexed by a slot, then all that says which expert a slot holds."""
        assert self.layout is not None and self._mover is not None, "only an engine with a mover moves experts"
        rank, current, offload = self.layout.rank, self.layout.placements[layer], self._offload
        before, after = current.experts_of(rank), wanted.experts_of(rank)
        if offload is not None:
            offload.drain()  # a copy reads what it was asked to read
        if offload is not None and offload.host.by_table:
            self._mover.agree(current, wanted)
            received = sum(now is not None and now != then for then, now in zip(before, after, strict=True))
        else:
            received = self._mover.move(self._bundles[layer], current, wanted).received
        self.layout.set(layer, wanted)
        self.load.place(layer, after)
        if offload is not None:
            offload.place(layer, before, after)
        self.experts_moved += received
        self._moved_in_pass += 1

    def _write_profile(self) -> None:
        """The placements that suit all rows so far."""
        self._profile_due = False
        if self.layout is None or self.group is None:
            logger.warning("balance.profile=%s is not written: one rank holds every expert.", self.balance.profile)
            return
        if self._looked_at[-1] != self.num_steps:
            self._look()
        layers = list(self.layout.placements)
        current = [self.layout.placements[layer] for layer in layers]
        placements = next_placements(self.window.total_LE[layers], current, self._shape)
        if self._is_first and self.balance.profile is not None:
            source = f"{self.num_steps} steps, {int(self.window.total_LE.sum())} rows"
            text = plan_text(model_shape(self.model), dict(zip(layers, placements)), source)
            _write("profile", self.balance.profile, text, f"placements for the load of {source}")
