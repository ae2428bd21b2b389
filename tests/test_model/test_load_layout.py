"""What each rank reads where layers have placements of their own: the right experts, in every slot, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import BalanceConfig, ParallelConfig
from expert_parallel.group import ExpertGroup
from expert_parallel.placement import Placement
from expert_parallel.plan_file import plan_text
from moe.model.causal_lm import CausalLM
from moe.model.families.registry import read_config
from moe.model.load_model import Spread, first_placements, load_model, model_shape
from moe.model.parameter_shapes import bundle_names
from tests.compare import assert_same_bits
from tests.tiny_models import write_variant

LAYERS = (1, 2)  # of deepseek_v3, tiny: 8 experts


def load(folder: Path, spread: Spread | None, load_format: str = "auto") -> CausalLM:
    options = {"max_model_len": 32, "mla_workspace_tokens": 64, "spread": spread, "load_format": load_format}
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"), **options)


def held(model: CausalLM) -> dict[int, dict[str, list[tuple[int | None, Tensor]]]]:
    """For each layer and part of a bundle, what each slot holds, beside the expert that it says it holds."""
    targets, layout = model.targets(), model.layout
    return {
        layer: {name: list(zip(experts, targets[name].clone(), strict=True)) for name in bundle_names(layer, targets)}
        for layer, experts in layout.experts.items()
    }


class OneOfGroup(ExpertGroup):
    """A rank whose others exist in name alone: loading asks them one thing, whether they were given the same plan."""

    def gather_objects(self, own: Any) -> list[Any]:
        return [own] * self.size


def share(rank: int, num_ranks: int, balance: BalanceConfig, kind: type[ExpertGroup] = OneOfGroup) -> Spread:
    nobody: Any = None
    return Spread(kind(rank, num_ranks, nobody), ParallelConfig(), max_rows=8, balance=balance)


def plan_of(num_ranks: int) -> dict[int, Placement]:
    """Backwards in one layer and turned by one in the next, some experts twice, and an empty slot."""
    slots = list(reversed(range(8)))
    rows = [slots[rank::num_ranks] for rank in range(num_ranks)]
    first = [[*row, 0, None] for row in rows]
    second = [[*rows[(rank + 1) % num_ranks], 3, 5] for rank in range(num_ranks)]
    return {1: Placement.of_ranks(8, first), 2: Placement.of_ranks(8, second)}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_C28_every_slot_holds_the_expert_that_its_layer_says(num_ranks: int, tmp_path: Path) -> None:
    """By rank within the group, from a checkpoint and from a seed, in order with replicas and by a plan."""
    write_variant(tmp_path, "deepseek_v3")
    (tmp_path / "plan.json").write_text(plan_text(model_shape(read_config(tmp_path)), plan_of(num_ranks), "a test"))
    for load_format, balance in (
        ("auto", BalanceConfig(redundant_experts=3 if num_ranks > 1 else 0)),
        ("auto", BalanceConfig(plan=str(tmp_path / "plan.json"))),
        ("dummy", BalanceConfig(plan=str(tmp_path / "plan.json"))),
    ):
        whole = load(tmp_path, None, load_format).targets()
        placements = first_placements(read_config(tmp_path), balance, num_ranks)
        for rank in range(num_ranks):
            of_rank = held(load(tmp_path, share(rank, num_ranks, balance), load_format))
            assert tuple(of_rank) == LAYERS
            for layer, parts in of_rank.items():
                assert len(parts) == 2
                for name, slots in parts.items():
                    assert tuple(expert for expert, _ in slots) == placements[layer].experts_of(rank)
                    for expert, tensor in slots:
                        if expert is not None:
                            assert_same_bits(tensor, whole[name][expert])


class OthersDiffer(OneOfGroup):
    def gather_objects(self, own: Any) -> list[Any]:
        return [own, f"{own} "]


def test_ranks_with_different_plans_and_too_many_replicas_are_refused(tmp_path: Path) -> None:
    write_variant(tmp_path, "deepseek_v3")
    config, plan = read_config(tmp_path), plan_of(2)
    (tmp_path / "a.json").write_text(plan_text(model_shape(config), plan, "a test"))
    with pytest.raises(ValueError, match=r"balance.plan=.*json is another file on some ranks; give all the same"):
        load(tmp_path, share(0, 2, BalanceConfig(plan=str(tmp_path / "a.json")), OthersDiffer))
    with pytest.raises(ValueError, match=r"redundant_experts=9 exceeds 8, with which each of the 2 ranks could hold"):
        first_placements(config, BalanceConfig(redundant_experts=9), 2)
    uneven = replace(plan[2], ranks=(plan[2].ranks[0][:-1], (*plan[2].ranks[1], 5)))
    (tmp_path / "c.json").write_text(plan_text(model_shape(config), {1: plan[1], 2: uneven}, "a test"))
    with pytest.raises(ValueError, match="gives ranks other numbers of slots in one layer than in another"):
        first_placements(config, BalanceConfig(plan=str(tmp_path / "c.json")), 2)
