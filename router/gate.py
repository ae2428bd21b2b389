"""The router of one sparse layer: fp32 logits of every expert, then the family's rule. Knows no placement.

Logits are fp32 for every dtype of model and every number of rows: operands are multiplied as they are stored, summed in
fp32 and never rounded, so near ties are decided the same way in a batch of one and a batch of thousands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.gate import gate
from kernels.gate_few import NormedRouting, Undecided, gate_and_pack, leave_open, norm_gate_and_pack
from kernels.pack import Packed, pack
from kernels.rmsnorm import Norm, rmsnorm_residual
from kernels.routing import Routing, RoutingRule

MayChoose = Callable[[Tensor, int, RoutingRule], bool]
"""Whether who computes the experts of these rows would choose among so many, by this rule, itself."""


class Router(ABC):
    """All that a layer asks of its router, for whoever can say which experts rows go to."""

    @abstractmethod
    def __call__(self, x_TD: Tensor, real_T: Tensor | None = None) -> Routing:
        """Rows that `real_T` calls padding get ids of -1."""

    def and_pack(
        self,
        x_TD: Tensor,
        slot_of_E: Tensor,
        num_slots: int,
        real_T: Tensor | None = None,
        may_choose: MayChoose | None = None,
    ) -> tuple[Routing, Packed | Undecided]:
        """The same, and what `kernels.pack.pack` makes of the ids; where somebody `may_choose`, it may be left open."""
        routing = self(x_TD, real_T)
        return routing, pack(routing.expert_ids_TK, slot_of_E, num_slots)

    def norm_and_pack(
        self,
        x_TD: Tensor,
        residual_TD: Tensor,
        norm: Norm,
        slot_of_E: Tensor,
        num_slots: int,
        real_T: Tensor | None = None,
        may_choose: MayChoose | None = None,
    ) -> NormedRouting:
        """The same of the norm of x + residual, which comes with it."""
        y_TD, new_residual_TD = rmsnorm_residual(x_TD, residual_TD, *norm)
        return NormedRouting(y_TD, new_residual_TD, *self.and_pack(y_TD, slot_of_E, num_slots, real_T, may_choose))


class Gate(Router):
    """weight_ED in the model dtype; bias_E (fp32 or None) shifts the selection only, as the rule says."""

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None, rule: RoutingRule) -> None:
        rule.check(weight_ED.shape[0])
        assert bias_E is None or bias_E.dtype == torch.float32, f"the selection bias is fp32, not {bias_E.dtype}"
        self.weight_ED = weight_ED
        self.bias_E = bias_E
        self.rule = rule
        # Programs of one launch count themselves in it, and leave zero.
        self._counter_1 = torch.zeros(1, dtype=torch.int32, device=weight_ED.device)

    def __call__(self, x_TD: Tensor, real_T: Tensor | None = None) -> Routing:
        return gate(x_TD, self.weight_ED, self.bias_E, self.rule, real_T=real_T)

    def and_pack(
        self,
        x_TD: Tensor,
        slot_of_E: Tensor,
        num_slots: int,
        real_T: Tensor | None = None,
        may_choose: MayChoose | None = None,
    ) -> tuple[Routing, Packed | Undecided]:
        """Of few rows in one launch. Not on two streams at once."""
        gated = (x_TD, self.weight_ED, self.bias_E, self.rule)
        if self._is_left_open(x_TD, may_choose):
            routed = leave_open(x_TD, None, None, *gated[1:], slot_of_E, num_slots, real_T=real_T)
            return routed.routing, routed.packed
        return gate_and_pack(*gated, slot_of_E, num_slots, real_T=real_T, counter_1=self._counter_1)

    def norm_and_pack(
        self,
        x_TD: Tensor,
        residual_TD: Tensor,
        norm: Norm,
        slot_of_E: Tensor,
        num_slots: int,
        real_T: Tensor | None = None,
        may_choose: MayChoose | None = None,
    ) -> NormedRouting:
        """Of few rows in one launch. Not on two streams at once."""
        gated = (x_TD, residual_TD, norm, self.weight_ED, self.bias_E, self.rule)
        if self._is_left_open(x_TD, may_choose):
            return leave_open(*gated, slot_of_E, num_slots, real_T=real_T)
        return norm_gate_and_pack(*gated, slot_of_E, num_slots, real_T=real_T, counter_1=self._counter_1)

    def _is_left_open(self, x_TD: Tensor, may_choose: MayChoose | None) -> bool:
        if may_choose is None or x_TD.dtype != self.weight_ED.dtype:
            return False
        return may_choose(x_TD, self.weight_ED.shape[0], self.rule)
