"""The Mixture-of-Experts layer. Start here: router -> dispatch -> experts -> combine, plus shared experts.

Knows the order of those four and nothing of how each is done. Between the router and the end of combine nothing waits
for the device and no shape depends on the routing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expert_parallel.choice import Dispatchers
from expert_parallel.rounds import rounds
from kernels.rmsnorm import Norm, rmsnorm_residual
from kernels.routing import Routing
from moe.model.config import MoEConfig
from moe.model.experts import DenseMLP, Experts, Fp8Experts, make_experts
from moe.model.linear import Parameters
from moe.model.offloaded_experts import Offload
from moe.model.step_plan import StepPlan
from router.gate import Gate, Router


class MoELayer:
    """One sparse layer. Its output is complete on every rank: the dispatcher's combine is the only reduction of routed
    rows, and shared experts are computed by each rank for its own rows, so nothing sums them a second time."""

    def __init__(
        self,
        moe: MoEConfig,
        index: int,
        parameters: Parameters,
        dispatchers: Dispatchers,
        offload: Offload | None = None,
    ) -> None:
        name = f"layers.{index}.moe"
        self.index = index
        weight_ED, bias_E = parameters[f"{name}.gate.weight"], parameters.get(f"{name}.gate.bias")
        self.gate: Router = Gate(weight_ED, bias_E, moe.rule)
        self.dispatchers = dispatchers
        self.experts = make_experts(parameters, f"{name}.experts") if offload is None else offload.experts[index]
        self.top_k = moe.rule.top_k
        self._may_choose = self.experts.may_choose if isinstance(self.experts, Experts | Fp8Experts) else None
        self.shared: DenseMLP | None = None
        if moe.shared_dim:
            down = parameters.linear(f"{name}.shared.down")
            self.shared = DenseMLP(parameters[f"{name}.shared.gate_up.weight"], down)

    def stages(
        self, x_TD: Tensor, residual_TD: Tensor, norm: Norm, plan: StepPlan, first_norm: Norm | None = None
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """(normalised rows, new residual): the norm that follows the layer comes with the combine.

        `first_norm`: x is still to be added to the residual and normalised, with few rows in the router's launch. Rows
        that `step.real_T` calls padding go to no expert. Stops before dispatch, experts and combine (of the first
        round, which is mostly the only one): there another half of the step may go on.
        """
        num_tokens = x_TD.shape[0]
        dispatcher = self.dispatchers.prefill if plan.step.any_prefill else self.dispatchers.decode
        own_slots, packed = dispatcher.own_slots, None
        shared, shared_TD = self.shared, None
        along = self._takes_along(x_TD) if own_slots is not None else None
        beside = plan.beside if shared is not None and along is None else None
        if first_norm is not None and (own_slots is None or beside is not None):
            x_TD, residual_TD = rmsnorm_residual(x_TD, residual_TD, *first_norm)
            first_norm = None
        if shared is not None and beside is not None:
            beside.fork()
            with beside.use():
                shared_TD = shared(x_TD, plan.all_rows_2)
        if own_slots is None:
            routing = self.gate(x_TD, plan.step.real_T)
        else:
            asked = (own_slots.slot_of_E, own_slots.num_slots, plan.step.real_T, self._may_choose)
            if first_norm is not None:
                routed = self.gate.norm_and_pack(x_TD, residual_TD, first_norm, *asked)
                x_TD, residual_TD, routing, packed = routed
            else:
                routing, packed = self.gate.and_pack(x_TD, *asked)
        yield
        fill = max(plan.step.most_rows - num_tokens, 0) if dispatcher.equal_rows else 0
        filled = _Rows(x_TD, *routing, residual_TD) if not fill else _filled_up(x_TD, routing, residual_TD, fill)
        parts: list[tuple[Tensor, Tensor]] = []
        offsets: list[Tensor] = []
        for rows, inputs in rounds(dispatcher, filled.x_TD, filled.expert_ids_TK, filled.weights_TK, packed):
            if not parts:
                yield
            if shared is not None and along is not None:
                y_RD, shared_TD = along.with_shared(inputs, shared)
            else:
                y_RD = self.experts(inputs)
            if not parts:
                if beside is not None:
                    beside.join()  # what was never forked may not be joined: a capture would fail
                elif shared is not None and along is None:
                    shared_TD = shared(x_TD, plan.all_rows_2)
                if shared_TD is not None and fill:
                    shared_TD = F.pad(shared_TD, (0, 0, 0, fill))
                yield
            # Shared rows are unscaled: the routed scale belongs to the router's weights.
            added_TD = None if shared_TD is None else shared_TD[rows]
            parts.append(dispatcher.combine_norm(y_RD, inputs.handle, filled.residual_TD[rows], norm, added_TD))
            offsets.append(inputs.offsets_S1)
        self._count(offsets, plan)
        y_TD, new_residual_TD = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
        return (y_TD, new_residual_TD) if not fill else (y_TD[:num_tokens], new_residual_TD[:num_tokens])

    def _takes_along(self, x_TD: Tensor) -> Experts | None:
        """The experts, if their launch takes the shared ones along."""
        if self.shared is None or not isinstance(self.experts, Experts):
            return None
        takes = self.experts.takes_along(x_TD, x_TD.shape[0] * self.top_k, self.shared)
        return self.experts if takes else None

    def _count(self, offsets: list[Tensor], plan: StepPlan) -> None:
        """Offsets are running sums of rows, and so is their sum over the rounds."""
        if plan.load is not None:
            plan.load.add(self.index, sum(offsets[1:], offsets[0]))


class _Rows(NamedTuple):
    """What a layer has for each row."""

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    residual_TD: Tensor


def _filled_up(x_TD: Tensor, routing: Routing, residual_TD: Tensor, fill: int) -> _Rows:
    """For dispatchers to which all ranks bring equally many rows: `fill` more that go to no expert, and are dropped."""
    below = (0, 0, 0, fill)
    ids_TK = F.pad(routing.expert_ids_TK, below, value=-1)
    return _Rows(F.pad(x_TD, below), ids_TK, F.pad(routing.weights_TK, below), F.pad(residual_TD, below))
