"""Dummy weights: what they hold, and that they depend on name, seed and logical expert alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.routing import RoutingRule
from moe.model.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from moe.model.dummy import fill_dummy
from moe.model.parameter_shapes import parameter_shapes
from tests.compare import assert_same_bits

CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    dense_dim=48,
    attention=MLAConfig(4, 24, 16, 8, 12, q_lora_rank=20, qkv_bias=True),
    moe=MoEConfig(6, 40, RoutingRule(2, "sigmoid"), correction_bias=True, shared_dim=40),
    sparse_layers=(False, True),
    sliding_windows=(0, 0),
    rope=RopeConfig(10000.0, 8),
    norm_eps=1e-6,
    max_positions=128,
    softmax_scale=1.0,
    tie_embeddings=False,
    dtype="bfloat16",
)


def _targets(num_slots: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {
        name: torch.full(spec.shape, torch.nan, dtype=spec.dtype(dtype), device=device)
        for name, spec in parameter_shapes(CONFIG, num_slots).items()
    }


def test_norms_are_one_the_selection_bias_zero_and_the_rest_normal():
    targets = _targets(6)
    fill_dummy(targets, seed=3)
    for name, tensor in targets.items():
        value = tensor.float()
        if "norm" in name:
            assert bool((value == 1).all()), name
        elif name.endswith("gate.bias"):
            assert bool((value == 0).all()), name
        else:
            # the mean and spread of n draws lie within 5 standard errors
            n = value.numel()
            assert abs(float(value.mean())) < 5 * 0.02 / n**0.5, name
            assert abs(float(value.std()) - 0.02) < 5 * 0.02 / (2 * n) ** 0.5, name


def test_the_same_seed_gives_the_same_bits_in_any_order_and_another_seed_others():
    first, again, other = _targets(6), dict(reversed(_targets(6).items())), _targets(6)
    fill_dummy(first, seed=3)
    fill_dummy(again, seed=3)
    fill_dummy(other, seed=4)
    for name in first:
        assert_same_bits(first[name], again[name])
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["embed.weight"], first["lm_head.weight"])


def test_an_expert_is_the_same_in_any_slot_and_an_empty_slot_is_left_alone():
    whole, part = _targets(6), _targets(4)
    fill_dummy(whole, seed=3)
    experts = [5, None, 2, 5]  # a replica of expert 5 and an empty slot
    fill_dummy(part, seed=3, experts=experts)
    for name in ("layers.1.moe.experts.w13", "layers.1.moe.experts.w2"):
        for slot, expert in enumerate(experts):
            if expert is None:
                assert bool(part[name][slot].isnan().all())
            else:
                assert_same_bits(part[name][slot], whole[name][expert])
        assert not torch.equal(whole[name][0], whole[name][1])
    assert_same_bits(part["layers.1.moe.gate.weight"], whole["layers.1.moe.gate.weight"])


@pytest.mark.gpu
def test_on_a_gpu_weights_are_drawn_there_and_repeat():
    first, again = _targets(6, "cuda"), _targets(6, "cuda")
    fill_dummy(first, seed=3)
    fill_dummy(again, seed=3)
    for name in first:
        assert_same_bits(first[name], again[name])
    assert abs(float(first["embed.weight"].float().std()) - 0.02) < 0.002
