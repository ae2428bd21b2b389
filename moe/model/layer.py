"""The Mixture-of-Experts layer. Start here: router -> dispatch -> experts -> combine, plus shared experts.

Knows the order of those four and nothing of how each is done. Between the router and the end of combine nothing waits
for the device and no shape depends on the routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expert_parallel.dispatcher import Dispatcher
from moe.model.config import MoEConfig
from moe.model.experts import DenseMLP, make_experts
from moe.model.linear import Parameters
from router.gate import Gate
from router.load import LoadCounter


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

    def __call__(
        self, x_TD: Tensor, all_rows_2: Tensor, load: LoadCounter | None = None, real_T: Tensor | None = None
    ) -> Tensor:
        """Rows in, rows out. `all_rows_2` is (0, T) on the device. Rows that `real_T` calls padding go to no expert."""
        expert_ids_TK, weights_TK = self.gate(x_TD)
        if real_T is not None:
            expert_ids_TK = torch.where(real_T[:, None], expert_ids_TK, -1)
        if load is not None:
            load.add(self.index, expert_ids_TK)
        inputs = self.dispatcher.dispatch(x_TD, expert_ids_TK, weights_TK)
        y_RD = self.experts(inputs)
        out_TD = self.dispatcher.combine(y_RD, inputs.handle)
        if self.shared is not None:
            out_TD += self.shared(x_TD, all_rows_2)  # unscaled: the routed scale belongs to the router's weights
        return out_TD
