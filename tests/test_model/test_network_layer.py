"""The MoE layer: worked examples with identity weights, load counts, and on a GPU what it launches and waits for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch

from expert_parallel.choice import Dispatchers
from expert_parallel.placement import Placement
from kernels.rmsnorm import Norm, rmsnorm_residual
from kernels.routing import RoutingRule
from moe.model.config import MoEConfig
from moe.model.experts import DenseMLP
from moe.model.layer import MoELayer
from moe.model.linear import Linear, Parameters
from moe.model.overlap import SideStream, run_through
from moe.model.step_input import StepInput
from moe.model.step_plan import StepPlan
from router.load import LoadCounter
from tests.compare import assert_same_bits, host_never_waits

ONE = 1.2784645427610738  # silu(ONE) = 1: a gate that reads the constant last entry of a row lets `up` pass unchanged


def swiglu_scaling(factor: float, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down of an MLP that computes factor * x on the first width - 1 entries of rows that end in 1."""
    gate = torch.zeros(width, width)
    gate[:, -1] = ONE
    up = torch.eye(width)
    down = factor * torch.eye(width)
    down[-1] = 0.0
    return torch.cat((gate, up)), down


def layer_of_scalings(
    num_experts: int, rule: RoutingRule, router_ED: torch.Tensor, placement: Placement, rank: int, shared: float | None
) -> MoELayer:
    """Expert e computes (e + 1) * x, the shared expert shared * x."""
    width = router_ED.shape[1]
    held = placement.experts_of(rank)
    pairs = [swiglu_scaling(torch.nan if expert is None else expert + 1.0, width) for expert in held]
    tensors = {
        "layers.0.moe.gate.weight": router_ED,
        "layers.0.moe.experts.w13": torch.stack([pair[0] for pair in pairs]),
        "layers.0.moe.experts.w2": torch.stack([pair[1] for pair in pairs]),
    }
    if shared is not None:
        tensors["layers.0.moe.shared.gate_up.weight"], tensors["layers.0.moe.shared.down.weight"] = swiglu_scaling(
            shared, width
        )
    moe = MoEConfig(num_experts, expert_dim=width, rule=rule, shared_dim=0 if shared is None else width)
    return MoELayer(moe, 0, Parameters(tensors), Dispatchers.local(placement, rank, "cpu"))


def inputs_of(
    x_TD: torch.Tensor, load: LoadCounter | None = None, real_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Norm, StepPlan]:
    """What a layer takes beside its rows, with a residual of zero and a plain norm."""
    num_tokens, device = x_TD.shape[0], x_TD.device
    positions_T = torch.arange(num_tokens, device=device)
    step = StepInput(positions_T, positions_T, positions_T, num_tokens, None, None, positions_T, real_T)
    norm = Norm(torch.ones(x_TD.shape[1], dtype=x_TD.dtype, device=device), 1e-6)
    return x_TD, torch.zeros_like(x_TD), norm, StepPlan(step, (), load)


def rows_of(layer: MoELayer, *args) -> torch.Tensor:
    """The layer's own rows: the new residual where the old one is zero. Arguments of `inputs_of`."""
    inputs = inputs_of(*args)
    out_TD = run_through(layer.stages(*inputs))[1]
    if inputs[-1].load is not None:
        inputs[-1].load.end_step()
    return out_TD


X = torch.tensor([[0.5, -2.0, 3.0, 1.0], [7.0, 0.25, -1.0, 1.0]])


def test_C46_shared_expert_is_added_once_and_unscaled() -> None:
    """0.5 * 1x + 0.5 * 2x + 10x = 11.5x; the router's scale 2 doubles the routed part and not the shared one."""
    router_ED = torch.zeros(4, 4)
    router_ED[2:, -1] = -50.0  # experts 0 and 1 tie, the others are out of reach
    for scale, expected in ((1.0, 11.5), (2.0, 13.0)):
        rule = RoutingRule(top_k=2, scale=scale)
        layer = layer_of_scalings(4, rule, router_ED, Placement.contiguous(4, 1), 0, shared=10.0)
        torch.testing.assert_close(rows_of(layer, X)[:, :3], expected * X[:, :3])


@pytest.mark.parametrize("shared", [None, 10.0])
def test_what_was_not_forked_is_not_joined(shared) -> None:
    """A side stream that nobody forked holds work of others: joined in a capture, it breaks it."""

    class Side(SideStream):
        forks = joins = 0

        def fork(self) -> None:
            self.forks += 1

        def join(self) -> None:
            self.joins += 1

    layer = layer_of_scalings(4, RoutingRule(top_k=2), torch.eye(4), Placement.contiguous(4, 1), 0, shared=shared)
    x_TD, residual_TD, norm, plan = inputs_of(X)
    side = Side(torch.device("cpu"))
    beside_TD = run_through(layer.stages(x_TD, residual_TD, norm, replace(plan, beside=side)))[1]
    assert side.forks == side.joins == (0 if shared is None else 1)
    assert_same_bits(beside_TD, run_through(layer.stages(x_TD, residual_TD, norm, plan))[1])


def test_C46_replicated_shared_expert_and_split_routed_ones() -> None:
    """Two ranks hold two experts each: their routed parts add up to the whole, the shared part is of one rank alone."""
    router_ED = torch.zeros(4, 4)
    router_ED[0, -1] = router_ED[3, -1] = 50.0  # experts 0 and 3: one on each rank
    rule, placement = RoutingRule(top_k=2), Placement.contiguous(4, 2)
    routed = [rows_of(layer_of_scalings(4, rule, router_ED, placement, rank, shared=None), X) for rank in range(2)]
    whole = rows_of(layer_of_scalings(4, rule, router_ED, Placement.contiguous(4, 1), 0, shared=10.0), X)
    torch.testing.assert_close(whole[:, :3], (0.5 * 1 + 0.5 * 4 + 10) * X[:, :3])
    torch.testing.assert_close((routed[0] + routed[1])[:, :3], whole[:, :3] - 10.0 * X[:, :3])


def test_C28_layer_with_moved_experts_has_the_same_bits() -> None:
    """Weights .4, .3, .2, .1 on experts 7, 0, 3, 5: 4.9x, whatever slots they lie in, empty slots between."""
    router_ED = torch.full((8, 4), 0.0)
    router_ED[:, -1] = -80.0
    for expert, weight in ((7, 0.4), (0, 0.3), (3, 0.2), (5, 0.1)):
        router_ED[expert, -1] = torch.tensor(weight).log()
    placements = [
        Placement.contiguous(8, 1),
        Placement.of_ranks(8, [[3, None, 7, 1, 0, 2, None, 6, 5, 4]]),
    ]
    outputs = [
        rows_of(layer_of_scalings(8, RoutingRule(top_k=4), router_ED, placement, 0, shared=None), X)
        for placement in placements
    ]
    torch.testing.assert_close(outputs[0][:, :3], 4.9 * X[:, :3])
    assert_same_bits(*outputs)


def test_rows_are_counted_where_they_are_real() -> None:
    router_ED = torch.zeros(4, 4)
    router_ED[2:, -1] = -50.0
    layer = layer_of_scalings(4, RoutingRule(top_k=2), router_ED, Placement.contiguous(4, 1), 0, shared=None)
    load = LoadCounter(1, 4, "cpu")
    rows_of(layer, X, load)
    assert load.snapshot().tolist() == [[2, 2, 0, 0]]
    rows_of(layer, X, load, torch.tensor([True, False]))
    assert load.snapshot().tolist() == [[3, 3, 0, 0]]


def test_no_rows() -> None:
    layer = layer_of_scalings(4, RoutingRule(top_k=2), torch.zeros(4, 4), Placement.contiguous(4, 1), 0, shared=10.0)
    assert rows_of(layer, X[:0]).shape == (0, 4)


def random_layer(device: str, dtype: torch.dtype, width: int = 256, num_experts: int = 16) -> MoELayer:
    torch.manual_seed(0)
    tensors = {
        "layers.0.moe.gate.weight": torch.randn(num_experts, width),
        "layers.0.moe.experts.w13": torch.randn(num_experts, 2 * 128, width) * width**-0.5,
        "layers.0.moe.experts.w2": torch.randn(num_experts, width, 128) * 128**-0.5,
    }
    parameters = Parameters({name: tensor.to(device, dtype) for name, tensor in tensors.items()})
    dispatchers = Dispatchers.local(Placement.contiguous(num_experts, 1), 0, device)
    moe = MoEConfig(num_experts, expert_dim=128, rule=RoutingRule(top_k=4))
    return MoELayer(moe, 0, parameters, dispatchers)


def test_padding_rows_go_to_no_expert() -> None:
    layer, load = random_layer("cpu", torch.float32), LoadCounter(1, 16, "cpu")
    x_TD = torch.randn(5, 256)
    whole_TD = rows_of(layer, x_TD)
    padded_TD = rows_of(layer, x_TD, load, torch.tensor([True, False, True, True, False]))
    assert torch.equal(padded_TD[[0, 2, 3]], whole_TD[[0, 2, 3]])
    assert bool((padded_TD[[1, 4]] == 0).all())
    assert int(load.snapshot().sum()) == 3 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
def test_the_layer_never_waits_for_the_device(num_tokens: int) -> None:
    """From router to combine, with counting: any host sync raises."""
    layer, load = random_layer("cuda", torch.bfloat16), LoadCounter(1, 16, "cuda")
    x_TD = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)
    inputs = inputs_of(x_TD, load, torch.ones(num_tokens, dtype=torch.bool, device="cuda"))
    run_through(layer.stages(*inputs))  # compile first
    load.end_step()
    with host_never_waits():
        out_TD = run_through(layer.stages(*inputs))[1]
    load.end_step()
    expected_TD = rows_of(random_layer("cpu", torch.bfloat16), x_TD.cpu())
    assert float((out_TD.cpu() - expected_TD).float().norm() / expected_TD.float().norm()) < 0.02
    assert int(load.snapshot().sum()) == 2 * 4 * num_tokens


def on_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_the_layer_runs_on_our_kernels(num_tokens: int) -> None:
    """The profiler sees our kernels for logits, routing, packing, both products and the sum, and no library product."""
    layer = random_layer("cuda", torch.bfloat16)
    x_TD = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)
    inputs = inputs_of(x_TD)
    run_through(layer.stages(*inputs))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_through(layer.stages(*inputs))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or [] if str(event.device_type).endswith("CUDA")]
    router = ("_gate_few_kernel",) if num_tokens == 1 else ("_gate_kernel", "_route_kernel")
    products = "experts_few_kernel" if num_tokens == 1 and on_hopper() else "_grouped_gemm"
    for ours in (*router, products, "_combine_norm_kernel"):
        assert any(ours in name for name in names), f"{ours} is missing among {names}"
    if num_tokens > 1:
        assert any("_pack_slots_kernel" in name or "_rank_kernel" in name for name in names), names
    foreign = [name for name in names if any(word in name for word in ("cutlass", "cublas", "nvjet", "sgemm", "xmma"))]
    assert not foreign, foreign


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_rows_take_few_launches_with_the_norm_before_them(num_tokens: int) -> None:
    """Router, with norm, choice and packing; two products, on Hopper in one launch; the sum with the norm behind it.
    The bits are those of the norm alone and the layer behind it."""
    layer = random_layer("cuda", torch.bfloat16, width=1024)
    x_TD = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    _, _, norm, plan = inputs_of(x_TD)
    first_norm = Norm(1 + 0.1 * torch.randn_like(x_TD[0]), 1e-6)
    run_through(layer.stages(x_TD, x_TD, norm, plan, first_norm))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        together = run_through(layer.stages(x_TD, x_TD, norm, plan, first_norm))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or [] if "_kernel" in event.name]
    assert len(names) == (3 if on_hopper() else 4), names
    apart = run_through(layer.stages(*rmsnorm_residual(x_TD, x_TD, *first_norm), norm, plan))
    for ours, expected in zip(together, apart, strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 9])
def test_shared_experts_come_along_with_few_tokens(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not behind the others, on Hopper; the bits are the same."""
    layer = random_layer("cuda", torch.bfloat16)
    gate_up_2FD, down_DF = torch.randn(2 * 320, 256) * 256**-0.5, torch.randn(256, 320) * 320**-0.5
    layer.shared = DenseMLP(gate_up_2FD.to("cuda", torch.bfloat16), Linear(down_DF.to("cuda", torch.bfloat16)))
    inputs = inputs_of(torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16))
    calls: list[None] = []
    call = DenseMLP.__call__
    monkeypatch.setattr(DenseMLP, "__call__", lambda *given: calls.append(None) or call(*given))
    together = run_through(layer.stages(*inputs))
    assert len(calls) == (0 if on_hopper() and num_tokens <= 8 else 1)
    monkeypatch.setattr(MoELayer, "_takes_along", lambda *_: None)
    apart = run_through(layer.stages(*inputs))
    for ours, expected in zip(together, apart, strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.gpu
def test_from_forward_to_a_launch_at_most_4_calls_and_4_files() -> None:
    """The way of every launch, read off the stack where Triton is entered; shared experts, unsplit, included."""
    layer = random_layer("cuda", torch.bfloat16)
    layer.shared = DenseMLP(
        torch.randn(2 * 128, 256, device="cuda", dtype=torch.bfloat16),
        Linear(torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)),
    )
    x_TD = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    inputs, root = inputs_of(x_TD), str(Path(__file__).parents[2])
    run_through(layer.stages(*inputs))
    ways: set[tuple[str, ...]] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or "/triton/" not in frame.f_code.co_filename:
            return
        way: list[str] = []
        caller = frame.f_back
        while caller is not None and caller.f_code is not MoELayer.stages.__code__:
            if "/triton/" in caller.f_code.co_filename:
                return  # already inside Triton
            way.append(f"{caller.f_code.co_filename.removeprefix(root)}:{caller.f_code.co_name}")
            caller = caller.f_back
        if caller is not None:
            ways.add(tuple(reversed(way)))

    sys.setprofile(enter)
    try:
        run_through(layer.stages(*inputs))
    finally:
        sys.setprofile(None)
    launched = [way for way in ways if way[-1].split(":")[0].startswith("/kernels/")]
    # Router, products and the sum; what is shared comes along on Hopper.
    assert len(launched) >= (3 if on_hopper() else 5), ways
    for way in launched:
        assert len(way) <= 4, way
        assert len({place.split(":")[0] for place in way} | {"/moe/model/layer.py"}) <= 4, way
