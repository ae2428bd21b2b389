"""The Mixture-of-Experts layer. Start here: router -> dispatch -> experts -> combine, plus shared experts.

Knows the order of those four and nothing of how each is done. Between the router and the end of combine nothing waits
for the device and no shape depends on the routing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from expert_parallel.choice import Dispatchers
from expert_parallel.dispatcher import Dispatcher
from expert_parallel.rounds import rounds
from kernels.rmsnorm import Norm, rmsnorm_residual
from kernels.routing import Routing
from moe.model.config import MoEConfig
from moe.model.experts import DenseMLP, make_experts
from moe.model.linear import Parameters
from moe.model.step_plan import StepPlan
from router.gate import Gate


class MoELayer:
    """One sparse layer. Its output is complete on every rank: the dispatcher's combine is the only reduction of routed
    rows, and shared experts are computed by each rank for its own rows, so nothing sums them a second time."""

    def __init__(self, moe: MoEConfig, index: int, parameters: Parameters, dispatchers: Dispatchers) -> None:
        name = f"layers.{index}.moe"
        self.index = index
        self.gate = Gate(parameters[f"{name}.gate.weight"], parameters.get(f"{name}.gate.bias"), moe.rule)
        self.dispatchers = dispatchers
        self.experts = make_experts(parameters, f"{name}.experts")
        self.shared: DenseMLP | None = None
        if moe.shared_dim:
            down = parameters.linear(f"{name}.shared.down")
            self.shared = DenseMLP(parameters[f"{name}.shared.gate_up.weight"], down)

    def __call__(self, x_TD: Tensor, residual_TD: Tensor, norm: Norm, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """(normalised rows, new residual): the norm that follows the layer comes with the combine.

        Rows that `step.real_T` calls padding go to no expert.
        """
        routing = self.gate(x_TD, plan.step.real_T)
        dispatcher = self.dispatchers.prefill if plan.step.any_prefill else self.dispatchers.decode
        if dispatcher.equal_rows and x_TD.shape[0] < plan.step.most_rows:
            return self._filled_up(dispatcher, x_TD, routing, residual_TD, norm, plan)
        shared_TD: Tensor | None = None
        parts: list[tuple[Tensor, Tensor]] = []
        offsets: list[Tensor] = []
        for rows, inputs in rounds(dispatcher, x_TD, *routing):
            y_RD = self.experts(inputs)
            if self.shared is not None and shared_TD is None:
                shared_TD = self.shared(x_TD, plan.all_rows_2)
            # Shared rows are unscaled: the routed scale belongs to the router's weights.
            shared = None if shared_TD is None else shared_TD[rows]
            parts.append(dispatcher.combine_norm(y_RD, inputs.handle, residual_TD[rows], norm, shared))
            offsets.append(inputs.offsets_S1)
        self._count(offsets, plan)
        if len(parts) == 1:
            return parts[0]
        y_TD, new_residual_TD = (torch.cat(each) for each in zip(*parts, strict=True))
        return y_TD, new_residual_TD

    def _filled_up(
        self, dispatcher: Dispatcher, x_TD: Tensor, routing: Routing, residual_TD: Tensor, norm: Norm, plan: StepPlan
    ) -> tuple[Tensor, Tensor]:
        """The same where all ranks must bring equally many rows: with rows that go to no expert, and are dropped."""
        num_tokens = x_TD.shape[0]
        fill = (0, 0, 0, plan.step.most_rows - num_tokens)
        ids_TK, weights_TK = F.pad(routing.expert_ids_TK, fill, value=-1), F.pad(routing.weights_TK, fill)
        parts: list[Tensor] = []
        offsets: list[Tensor] = []
        for _, inputs in rounds(dispatcher, F.pad(x_TD, fill), ids_TK, weights_TK):
            parts.append(dispatcher.combine(self.experts(inputs), inputs.handle))
            offsets.append(inputs.offsets_S1)
        self._count(offsets, plan)
        out_TD = torch.cat(parts)[:num_tokens]
        if not num_tokens:
            return out_TD, residual_TD
        if self.shared is not None:
            out_TD += self.shared(x_TD, plan.all_rows_2)
        return rmsnorm_residual(out_TD, residual_TD, *norm)

    def _count(self, offsets: list[Tensor], plan: StepPlan) -> None:
        """Offsets are running sums of rows, and so is their sum over the rounds."""
        if plan.load is not None:
            plan.load.add(self.index, sum(offsets[1:], offsets[0]))
