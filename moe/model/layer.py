"""The Mixture-of-Experts layer. Start here: router -> dispatch -> experts -> combine, plus shared experts.

Knows the order of those four and nothing of how each is done. Between the router and the end of combine nothing waits
for the device and no shape depends on the routing.
"""

from __future__ import annotations

from torch import Tensor

from expert_parallel.dispatcher import Dispatcher
from kernels.rmsnorm import Norm
from moe.model.config import MoEConfig
from moe.model.experts import DenseMLP, make_experts
from moe.model.linear import Parameters
from moe.model.step_plan import StepPlan
from router.gate import Gate


class MoELayer:
    """One sparse layer. Its output is complete on every rank: the dispatcher's combine is the only reduction of routed
    rows, and shared experts are computed by each rank for its own rows, so nothing sums them a second time."""

    def __init__(self, moe: MoEConfig, index: int, parameters: Parameters, dispatcher: Dispatcher) -> None:
        name = f"layers.{index}.moe"
        self.index = index
        self.gate = Gate(parameters[f"{name}.gate.weight"], parameters.get(f"{name}.gate.bias"), moe.rule)
        self.dispatcher = dispatcher
        self.experts = make_experts(parameters, f"{name}.experts")
        self.shared: DenseMLP | None = None
        if moe.shared_dim:
            down = parameters.linear(f"{name}.shared.down")
            self.shared = DenseMLP(parameters[f"{name}.shared.gate_up.weight"], down)

    def __call__(self, x_TD: Tensor, residual_TD: Tensor, norm: Norm, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """(normalised rows, new residual): the norm that follows the layer comes with the combine.

        Rows that `step.real_T` calls padding go to no expert.
        """
        expert_ids_TK, weights_TK = self.gate(x_TD, plan.step.real_T)
        inputs = self.dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
        if plan.load is not None:
            plan.load.add(self.index, inputs.offsets_S1)
        y_RD = self.experts(inputs)
        # Shared rows are unscaled: the routed scale belongs to the router's weights.
        shared_TD = None if self.shared is None else self.shared(x_TD, plan.all_rows_2)
        return self.dispatcher.combine_norm(y_RD, inputs.handle, residual_TD, norm, shared_TD)
