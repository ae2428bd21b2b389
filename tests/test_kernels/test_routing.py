"""Routing: the reference against hand-worked numbers and plain loops, the kernel against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kernels.routing import (
    Routing,
    RoutingRule,
    _route_kernel,
    choice_of,
    route,
    route_parts_triton,
    route_reference,
    route_triton,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.shapes import NUM_EXPERTS, NUM_TOKENS

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
"""Routing is fp32 and integers whatever the model's dtype, so one test a device is enough."""

V2 = RoutingRule(top_k=6, num_groups=8, topk_groups=3, renormalize=False, scale=16.0)
V3 = RoutingRule(
    top_k=8,
    score="sigmoid",
    num_groups=8,
    topk_groups=4,
    group_score="top2_sum",
    epsilon=1e-20,
    scale=2.5,
)
VARIANTS = {
    "mixtral": (RoutingRule(top_k=2), 8, False),
    "olmoe": (RoutingRule(top_k=8, renormalize=False), 64, False),
    "deepseek-v2": (V2, 160, False),
    "deepseek-v3": (V3, 256, True),
    "kimi-k2": (replace(V3, num_groups=1, topk_groups=1, scale=2.827), 384, True),
    "groups-of-three": (RoutingRule(top_k=4, score="sigmoid", num_groups=3, topk_groups=2), 9, True),
    "all-groups-kept": (replace(V3, top_k=5, num_groups=4, topk_groups=4), 12, True),
}


def draw(num_tokens: int, num_experts: int, *, bias: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits on a coarse grid, so that many are tied, and a bias of both signs."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator).mul(4).round().div(4)
    bias_E = torch.randn(num_experts, generator=generator).mul(2).round().div(4) if bias else None
    return logits_TE, bias_E


def assert_same_routing(ours: Routing, reference: Routing) -> None:
    """The same ids in the same order, weights up to the rounding of exp."""
    assert torch.equal(ours.expert_ids_TK.cpu(), reference.expert_ids_TK.cpu())
    if reference.weights_TK.numel():
        relative = (ours.weights_TK.cpu() - reference.weights_TK.cpu()).abs() / reference.weights_TK.cpu().abs()
        assert float(relative.max()) < 2e-6
    assert ours.expert_ids_TK.dtype == torch.int32 and ours.weights_TK.dtype == torch.float32


def assert_valid_ids(routing: Routing, num_experts: int) -> None:
    """Every id in range, no id twice in a row."""
    ids_TK = routing.expert_ids_TK.cpu()
    assert bool(((ids_TK >= 0) & (ids_TK < num_experts)).all())
    ordered = ids_TK.sort(dim=1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())


def route_by_loops(logits_E: list[float], bias_E: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """One token routed with Python lists in double precision: the header of kernels/routing.py, word by word."""
    values = torch.tensor(logits_E, dtype=torch.float64)
    scores = (values.softmax(0) if rule.score == "softmax" else values.sigmoid()).tolist()
    biased = [score + bias for score, bias in zip(scores, bias_E)]
    size = len(biased) // rule.num_groups
    groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(rule.num_groups)]
    worth = [group[0] if rule.group_score == "max" else sum(group[:2]) for group in groups]
    kept = sorted(range(rule.num_groups), key=lambda g: -worth[g])[: rule.topk_groups]
    candidates = [e for e in range(len(biased)) if e // size in kept]
    ids = sorted(candidates, key=lambda e: -biased[e])[: rule.top_k]
    total = sum(scores[e] for e in ids) + rule.epsilon if rule.renormalize else 1.0
    return ids, [scores[e] / total * rule.scale for e in ids]


@pytest.mark.parametrize("name", VARIANTS)
def test_reference_against_loops(name):
    rule, num_experts, has_bias = VARIANTS[name]
    generator = torch.Generator().manual_seed(1)
    logits_TE = torch.randn(20, num_experts, generator=generator)
    bias_E = torch.randn(num_experts, generator=generator) * 0.3 if has_bias else torch.zeros(num_experts)
    routing = route_reference(logits_TE, bias_E if has_bias else None, rule)
    for t in range(20):
        ids, weights = route_by_loops(logits_TE[t].tolist(), bias_E.tolist(), rule)
        assert routing.expert_ids_TK[t].tolist() == ids
        assert routing.weights_TK[t].tolist() == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_reference_bits_do_not_depend_on_the_batch(name):
    rule, num_experts, has_bias = VARIANTS[name]
    generator = torch.Generator().manual_seed(2)
    logits_TE = torch.randn(67, num_experts, generator=generator)
    bias_E = torch.randn(num_experts, generator=generator) if has_bias else None
    whole = route(logits_TE, bias_E, rule)
    for start, end in ((0, 1), (66, 67), (3, 40), (33, 67)):
        part = route(logits_TE[start:end].clone(), bias_E, rule)
        assert_same_bits(part.weights_TK, whole.weights_TK[start:end])
        assert torch.equal(part.expert_ids_TK, whole.expert_ids_TK[start:end])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_against_reference(device, name):
    rule, num_experts, has_bias = VARIANTS[name]
    logits_TE, bias_E = draw(33, num_experts, bias=has_bias)
    ours = route_triton(logits_TE.to(device), None if bias_E is None else bias_E.to(device), rule)
    assert_same_routing(ours, route_reference(logits_TE, bias_E, rule))
    assert_valid_ids(ours, num_experts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_kernel_for_numbers_of_tokens(device, num_tokens):
    """The logits are a slice of wider rows whose other columns are NaN: a read past E would show."""
    logits_TE, _ = draw(num_tokens, 60, bias=False)
    wide_TE = torch.full((num_tokens, 96), torch.nan)
    wide_TE[:, :60] = logits_TE
    rule = RoutingRule(top_k=4)
    ours = route_triton(wide_TE.to(device)[:, :60], None, rule)
    assert_same_routing(ours, route_reference(logits_TE, None, rule))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("all_experts", [False, True], ids=["k1", "kE"])
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
def test_C43_any_number_of_experts_and_choices(device, num_experts, all_experts):
    rule = RoutingRule(top_k=num_experts if all_experts else 1, score="sigmoid")
    logits_TE, bias_E = draw(2 if all_experts else 5, num_experts, bias=True)
    ours = route_triton(logits_TE.to(device), bias_E.to(device), rule)
    assert_same_routing(ours, route_reference(logits_TE, bias_E, rule))
    assert_valid_ids(ours, num_experts)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_take_the_lower_index(device):
    """All scores equal, also 0.0 beside -0.0 after the bias; and equal groups."""
    rule = RoutingRule(top_k=3, score="sigmoid", num_groups=4, topk_groups=2)
    zeros_TE = torch.zeros(2, 12, device=device)
    assert route_triton(zeros_TE, None, rule).expert_ids_TK.tolist() == [[0, 1, 2]] * 2
    logits_TE = torch.full((1, 4), -torch.inf, device=device)  # sigmoid gives 0.0
    bias_E = torch.tensor([-1.0, 0.0, -0.0, 0.0], device=device)
    assert route_triton(logits_TE, bias_E, RoutingRule(top_k=3, score="sigmoid")).expert_ids_TK.tolist() == [[1, 2, 3]]


C05_RULE = RoutingRule(top_k=4, score="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum")
C05_BIAS = [1.0, -0.9, 1.0, -0.9, -2.0, -2.0, -2.0, -2.0]


def test_C05_losing_groups_are_minus_infinity():
    for group_score in ("top2_sum", "max"):
        rule = replace(C05_RULE, group_score=group_score)
        routing = route_reference(torch.zeros(1, 8), torch.tensor(C05_BIAS), rule)
        assert sorted(routing.expert_ids_TK[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_C05_losing_groups_are_minus_infinity_in_the_kernel(device):
    for group_score in ("top2_sum", "max"):
        rule = replace(C05_RULE, group_score=group_score)
        bias_E = torch.tensor(C05_BIAS, device=device)
        routing = route_triton(torch.zeros(1, 8, device=device), bias_E, rule)
        assert sorted(routing.expert_ids_TK[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_C05_a_group_is_worth_its_two_best_or_its_best(device):
    """One group of two is kept. Biased scores: (0.9, -0.9), (0.4, 0.4), (0.3, 0.3), (-2, -2): sums 0, 0.8, 0.6, -4."""
    bias = torch.tensor([0.9, -0.9, 0.4, 0.4, 0.3, 0.3, -2.0, -2.0]) - 0.5  # sigmoid(0) is 0.5
    for group_score, experts in (("top2_sum", [2, 3]), ("max", [0, 1])):
        rule = replace(C05_RULE, top_k=2, topk_groups=1, group_score=group_score)
        for run, where in ((route_reference, "cpu"), (route_triton, device)):
            routing = run(torch.zeros(1, 8, device=where), bias.to(where), rule)
            assert sorted(routing.expert_ids_TK[0].tolist()) == experts, (run, group_score)


@pytest.mark.parametrize(
    ("rule", "num_experts", "words"),
    [
        (replace(C05_RULE, num_groups=3), 8, "num_groups=3 (n_group) does not divide num_experts=8"),
        (replace(C05_RULE, topk_groups=5), 8, "topk_groups=5 (topk_group) does not fit num_groups=4 (n_group)"),
        (replace(C05_RULE, topk_groups=0), 8, "topk_groups=0"),
        (replace(C05_RULE, top_k=5), 8, "top_k=5 exceeds the 4 experts left by topk_groups=2 groups of 2"),
        (
            replace(C05_RULE, num_groups=8, topk_groups=4),
            8,
            "group_score='top2_sum' needs groups of at least two experts",
        ),
        (RoutingRule(top_k=9), 8, "top_k=9 does not fit num_experts=8"),
        (RoutingRule(top_k=0), 8, "top_k=0"),
        (RoutingRule(top_k=1, num_groups=0), 8, "num_groups=0"),
        (RoutingRule(top_k=1, score="relu"), 8, "score='relu'"),  # pyright: ignore[reportArgumentType]
        (RoutingRule(top_k=1, group_score="sum"), 8, "group_score='sum'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_C05_impossible_rules_are_refused(rule, num_experts, words):
    with pytest.raises(ValueError) as error:
        rule.check(num_experts)
    assert words in str(error.value)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_get_no_expert(device):
    """Their neighbours get what they get alone."""
    logits_TE, bias_E = draw(9, 60, bias=True)
    real_T = torch.tensor([True, False, True, True, False, False, True, True, False])
    rule = RoutingRule(top_k=4, score="sigmoid")
    for run, where in ((route_reference, "cpu"), (route_triton, device)):
        operands = logits_TE.to(where), None if bias_E is None else bias_E.to(where), rule
        whole, masked = run(*operands), run(*operands, real_T=real_T.to(where))
        assert torch.equal(masked.expert_ids_TK[real_T], whole.expert_ids_TK[real_T])
        assert_same_bits(masked.weights_TK[real_T], whole.weights_TK[real_T])
        assert masked.expert_ids_TK[~real_T].unique().tolist() == [-1]


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_summed_in_order(device):
    """2^25 + 1 - 2^25 is 0 in that order, 1 in the other: the experts' logits are (0, 0.5) and then (1, 0.5)."""
    for parts, best in (([2.0**25, 1.0, -(2.0**25)], 1), ([2.0**25, -(2.0**25), 1.0], 0)):
        parts_PTE = torch.tensor([[[part, 0.5 if p == 0 else 0.0]] for p, part in enumerate(parts)], device=device)
        assert route_parts_triton(parts_PTE, None, RoutingRule(top_k=1), None).expert_ids_TK.tolist() == [[best]]


C11_CASES = [
    (RoutingRule(top_k=2, renormalize=False), [0.6439, 0.2369]),
    (RoutingRule(top_k=2, renormalize=True), [0.7311, 0.2689]),
    (RoutingRule(top_k=1, renormalize=True), [1.0]),
    (RoutingRule(top_k=1, renormalize=False), [0.6439]),
]


@pytest.mark.parametrize(("rule", "weights"), C11_CASES)
def test_C11_softmax_is_over_all_experts(rule, weights):
    routing = route_reference(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), None, rule)
    assert routing.weights_TK[0].tolist() == pytest.approx(weights, abs=5e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rule", "weights"), C11_CASES)
def test_C11_softmax_is_over_all_experts_in_the_kernel(device, rule, weights):
    routing = route_triton(torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device), None, rule)
    assert routing.weights_TK[0].tolist() == pytest.approx(weights, abs=5e-5)


def bad_rows(num_experts: int) -> torch.Tensor:
    """Rows with every kind of poison: all NaN, one NaN, +inf, all -inf, NaN of negative sign, NaN beside +inf."""
    rows_TE = torch.randn(7, num_experts, generator=torch.Generator().manual_seed(3))
    rows_TE[0] = torch.nan
    rows_TE[1, 2] = torch.nan
    rows_TE[2, 1] = torch.inf
    rows_TE[3] = -torch.inf
    rows_TE[4, 0] = -torch.tensor(torch.nan)
    rows_TE[5, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rows_TE[6, :] = torch.inf
    return rows_TE


C14_RULES = [
    RoutingRule(top_k=2),
    RoutingRule(top_k=8, renormalize=False),
    RoutingRule(top_k=2, score="sigmoid", epsilon=1e-20),
    RoutingRule(top_k=3, score="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum"),
    RoutingRule(top_k=3, num_groups=4, topk_groups=2),
]


def check_C14(run, device: str, rule: RoutingRule) -> None:
    good_TE = torch.randn(7, 8, generator=torch.Generator().manual_seed(4)).to(device)
    bad_TE = bad_rows(8).to(device)
    alone = run(good_TE, None, rule)
    mixed = run(torch.cat([bad_TE, good_TE]), None, rule)
    assert_valid_ids(mixed, 8)
    assert_same_bits(mixed.weights_TK[7:], alone.weights_TK)
    assert torch.equal(mixed.expert_ids_TK[7:], alone.expert_ids_TK)
    for row in (0, 1, 2, 4, 5, 6):
        assert bool(torch.isnan(mixed.weights_TK[row]).all()), f"row {row} must not pass for a real one"


@pytest.mark.parametrize("rule", C14_RULES)
def test_C14_nan_rows_keep_ids_valid_and_neighbours_untouched(rule):
    check_C14(route_reference, "cpu", rule)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", C14_RULES)
def test_C14_nan_rows_keep_ids_valid_and_neighbours_untouched_in_the_kernel(device, rule):
    check_C14(route_triton, device, rule)
    bad_TE = bad_rows(8)
    ours, reference = route_triton(bad_TE.to(device), None, rule), route_reference(bad_TE, None, rule)
    assert torch.equal(ours.expert_ids_TK.cpu(), reference.expert_ids_TK)
    assert torch.equal(torch.isnan(ours.weights_TK).cpu(), torch.isnan(reference.weights_TK))


@pytest.mark.parametrize("device", DEVICES)
def test_C14_an_expert_whose_bias_is_nan_is_chosen_last(device):
    """Its score is good, its selection score is not: it comes behind all others, with a weight that is a number."""
    bias_E = torch.tensor([0.0, torch.nan, 0.0, 0.0])
    for top_k, ids in ((2, [0, 2]), (4, [0, 2, 3, 1])):
        rule = RoutingRule(top_k=top_k, score="sigmoid")
        for run, where in ((route_reference, "cpu"), (route_triton, device)):
            routing = run(torch.zeros(1, 4, device=where), bias_E.to(where), rule)
            assert routing.expert_ids_TK.tolist() == [ids], run
            assert routing.weights_TK.tolist() == [[1 / top_k] * top_k], run


def random_case(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor | None, RoutingRule]:
    """Any rule that fits, on logits and biases of which some are NaN, infinite, huge or zeros of either sign."""
    num_groups, per_group = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 3, 5])
    topk_groups = rng.randint(1, num_groups)
    rule = RoutingRule(
        top_k=rng.randint(1, topk_groups * per_group),
        score=rng.choice(["softmax", "sigmoid"]),  # pyright: ignore[reportArgumentType]
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=rng.choice(["max", "top2_sum"] if per_group > 1 else ["max"]),  # pyright: ignore[reportArgumentType]
        renormalize=rng.random() < 0.5,
        epsilon=rng.choice([0.0, 1e-20]),
        scale=rng.choice([1.0, 2.5]),
    )
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits_TE = torch.randn(rng.choice([1, 3, 17]), num_groups * per_group, generator=generator) * 4
    bias_E = torch.randn(num_groups * per_group, generator=generator) if rng.random() < 0.6 else None
    # Nothing between 1e30 and 30: its exp is denormal, a number on the CPU and zero on a GPU, so ties would differ.
    poison = [torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 0.0, -0.0, 30.0, -30.0]
    for values in (logits_TE, bias_E):
        for _ in range(rng.randrange(4)):
            if values is not None:
                values.view(-1)[rng.randrange(values.numel())] = rng.choice(poison)
    return logits_TE, bias_E, rule


@pytest.mark.parametrize("device", DEVICES)
def test_C14_any_rule_on_any_logits_gives_valid_ids_and_the_references(device):
    rng = random.Random(14)
    for _ in range(60):
        logits_TE, bias_E, rule = random_case(rng)
        reference = route_reference(logits_TE, bias_E, rule)
        ours = route_triton(logits_TE.to(device), None if bias_E is None else bias_E.to(device), rule)
        assert_valid_ids(reference, logits_TE.shape[1])
        assert torch.equal(ours.expert_ids_TK.cpu(), reference.expert_ids_TK), (logits_TE, bias_E, rule)
        torch.testing.assert_close(ours.weights_TK.cpu(), reference.weights_TK, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_C31_near_ties_are_told_apart_in_fp32():
    """Logits 4.000 and 4.004 are one bf16 number, biases 5.0000 and 5.0005 too."""
    logits_TE = torch.tensor([[4.000, 4.004, 1.0, 0.0]])
    for score in ("softmax", "sigmoid"):
        assert route_reference(logits_TE, None, RoutingRule(top_k=1, score=score)).expert_ids_TK.tolist() == [[1]]
    bias_E = torch.tensor([5.0000, 5.0005, 0.0, 0.0])
    routing = route_reference(torch.zeros(1, 4), bias_E, RoutingRule(top_k=1, score="sigmoid"))
    assert routing.expert_ids_TK.tolist() == [[1]]


@pytest.mark.parametrize("device", DEVICES)
def test_C31_near_ties_are_told_apart_in_the_kernel(device):
    logits_TE = torch.tensor([[4.000, 4.004, 1.0, 0.0]], device=device)
    for score in ("softmax", "sigmoid"):
        assert route_triton(logits_TE, None, RoutingRule(top_k=1, score=score)).expert_ids_TK.tolist() == [[1]]
    bias_E = torch.tensor([5.0000, 5.0005, 0.0, 0.0], device=device)
    routing = route_triton(torch.zeros(1, 4, device=device), bias_E, RoutingRule(top_k=1, score="sigmoid"))
    assert routing.expert_ids_TK.tolist() == [[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_bits_do_not_depend_on_the_batch(name):
    rule, num_experts, has_bias = VARIANTS[name]
    logits_TE = torch.randn(40_000, num_experts, device="cuda")  # warps take more scores of so many rows
    bias_E = torch.randn(num_experts, device="cuda") if has_bias else None
    whole = route(logits_TE, bias_E, rule)
    for rows in (slice(39_999, None), slice(100, 1100)):
        part = route(logits_TE[rows].clone(), bias_E, rule)
        assert_same_bits(part.weights_TK, whole.weights_TK[rows])
        assert torch.equal(part.expert_ids_TK, whole.expert_ids_TK[rows])
    assert max_rel(whole.weights_TK, route_reference(logits_TE, bias_E, rule).weights_TK) < 3e-6


@aot
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, name):
    rule, num_experts, has_bias = VARIANTS[name]
    args = {
        "parts_ptr": "*fp32",
        "bias_ptr": "*fp32" if has_bias else None,
        "real_ptr": "*i1" if has_bias else None,
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "num_tokens": "i32",
        "stride_p": "i32",
        "stride_t": "i32",
        "NUM_PARTS": 8 if has_bias else 1,
        "PDL": arch >= 90,
        "epsilon": "fp32",
        "scale": "fp32",
        "CHOICE": choice_of(rule, num_experts)._replace(block_t=4),
    }
    assert compile_ahead(_route_kernel, arch, args)
