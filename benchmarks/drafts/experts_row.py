"""One row's experts in one launch (kernels/experts_few.py), with less between the wait and the first weights; and for
mixtral's row, too, which takes the router's own choice and two launches today. Predicted at one row, us a layer: qwen3
-0.3 to -0.6, dsv2-lite 0 to -0.2, mixtral -2 to -5 (-0.06 to -0.16 ms of 6.46).

The reckoning.
- To the first weights (qwen3, some 2 us: 0.75 until they are asked for, then memory). In sm_90 machine code the four
  divisions of a lane's scores follow each other, a branch each: 340 cycles, of which 65 are left when they go side by
  side (-0.14). A second group of warps finds its program's first piece from the logits themselves and asks for the
  first half of it (64 KiB, as many as may be on their way) into L2 while the first group still sums and divides, some
  400 cycles earlier (-0.15 to -0.25). dsv2-lite gains neither: its shared experts' pieces need no choice.
- Rows: of the eight of x and h, seven zeros, only what is there is copied. Were 16 copies a thread for x, by both
  groups, one of them beside the loads of logits, and 8 to 16 for each second piece: 2, and 1 (-0.05 to -0.1).
- Second pieces of 32 rows for 64, 256 columns of them a stage. Simulated, bytes shared by all programs, latencies 10 %
  apart: nothing, 18.4 us of qwen3's either way (17.1 by bytes), dsv2-lite 32.7 for 32.9, for memory is asked up to
  the end: three first and two second pieces of qwen3 are 99 % of a program's share. Both forms are here to be read.
- mixtral: h of 14336 columns comes in parts of 512, two at once, where shared experts' h came in one at a time: so rows
  of h ask for 32 KiB of any width, and 7 stages are left beside x. Simulated 161.4 us (159.4 by bytes), 162.8 with
  parts of 1024 one at a time. What two launches lose more was 1.1 to 1.8 us, and the router's choice 1.5 to 2.5, in
  the other two models.

To land: one row's `multiply`, `feed`, `choose` beside those of more rows, or in their place where 2 to 4 rows gain;
`_serves` asks for stages by `num_stages` here. Tests: tests/test_kernels/test_experts_few*.py at one row, mixtral's
shape too, F = 72, 1032 and 14336, peaked scores (both ways of `divided`), ties, a bias, experts elsewhere, padding.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from benchmarks.drafts._experts_row_feed import feed
from benchmarks.drafts._experts_row_layer import Run, drawn, whole
from benchmarks.drafts._experts_row_multiply import HALVES, multiply
from benchmarks.drafts.case import Case
from kernels import experts_few as product
from kernels.checks import next_power_of_2
from kernels.dependent_launch import dependent_launch
from kernels.experts_few import FewRows, SharedExperts
from kernels.experts_few_feed import BOXES, GROUPS, STAGE_BYTES
from kernels.gate_few import Undecided
from kernels.grouped_gemm_tma import tma_serves
from kernels.routing import RoutingRule
from kernels.tiles import device_generation, num_multiprocessors
from launch.replay import rotation_length
from moe.model import experts as user

_PART = 512
"""Columns of h that come at once, at most."""

_SERVES, _RUN = product.serves_undecided, product.experts_few_undecided
"""What is used for more rows, also when this is installed."""


# y = w2[s] h, h = silu(gate x) * (up x) with w13[s] of x, for the slot s of each of the experts that are chosen for x
#   as in kernels/experts_few.py, of one row: x_ptr [D]; h_ptr [K, F], y_ptr [K, D], those of shared experts behind
#   them; w2_desc, s2_desc in blocks of [ROWS, 64]; w13_ptr [S * 2F, D], the weights of w13_desc


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@gluon.jit(do_not_specialize=["num_rows", "num_slots", "top_k"])
def experts_row_kernel(
    x_ptr,
    w13_ptr,
    w13_desc,
    w2_desc,
    s13_desc,
    s2_desc,
    offsets_ptr,
    parts_ptr,
    bias_ptr,
    real_ptr,
    slot_of_ptr,
    ids_ptr,
    weights_ptr,
    packed_row_ptr,
    counters_ptr,
    h_ptr,
    y_ptr,
    num_rows,
    num_slots,
    num_hidden,
    num_columns,
    num_shared,
    top_k,
    epsilon,
    scale,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    BLOCK_D: gl.constexpr,
    PART: gl.constexpr,
    CHOICE: gl.constexpr,
    GUESS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = w13_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # Every piece takes a stage at least: so many turns later its note has been read.
    PLACES: gl.constexpr = STAGES + 2 * GROUPS
    # Room behind the last stage, for the rows that the tensor core reads in vain.
    ws = gl.allocate_shared_memory(dtype, [STAGES * BOXES + 2, 16, 64], SWIZZLED)
    xs = gl.allocate_shared_memory(dtype, [8, BLOCK_D], SWIZZLED)
    halves = gl.allocate_shared_memory(dtype, [GROUPS * HALVES, 8, PART], SWIZZLED)
    swaps = gl.allocate_shared_memory(gl.float32, [GROUPS, 64, 8], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [PLACES, 32], LINES)
    keys = gl.allocate_shared_memory(gl.int32, [1, CHOICE[5]], LINES)
    choices = gl.allocate_shared_memory(gl.int32, [1, CHOICE[5]], LINES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    handed_over = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(noted.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(handed_over.index(i), count=1)
    fence_async_shared()
    handed = (keys, handed_over.index(0), choices, handed_over.index(1))
    given, out = (parts_ptr, bias_ptr, real_ptr, slot_of_ptr), (ids_ptr, weights_ptr, packed_row_ptr)
    undecided = (given, out, top_k * 0 + 1, top_k, epsilon, scale)
    sizes = (num_slots, num_hidden, num_columns, num_shared, num_rows)
    ring, board, weights = (ws, full, empty), (notes, noted), (w13_desc, w2_desc, s13_desc, s2_desc)
    rows = (x_ptr, h_ptr, y_ptr, xs, halves, swaps)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                rows, w13_ptr, undecided, handed, counters_ptr, sizes, ring, board, ROWS, STAGES, PLACES, CHOICE, GUESS,
                PDL, 0,
            )),
            (multiply, (
                rows, w13_ptr, undecided, handed, counters_ptr, sizes, ring, board, ROWS, STAGES, PLACES, CHOICE, GUESS,
                PDL, 1,
            )),
            (feed, (
                weights, offsets_ptr, undecided, handed, counters_ptr, sizes, ring, board, ROWS, STAGES, PLACES,
                BLOCK_S, CHOICE, PDL,
            )),
        ],
        [4, 1],
        [120, 64],
    )
    # fmt: on


def num_stages(width: int, num_hidden: int, num_experts: int) -> int:
    """Of 16 KiB: as many as fit beside the row of x, parts of h of each group, and what is handed over.

    >>> num_stages(2048, 768, 128), num_stages(2048, 1408, 64), num_stages(4096, 14336, 8)
    (9, 9, 7)
    """
    rows = 16 * (_block_d(width) + GROUPS.value * HALVES.value * _part(num_hidden))
    room = product._SHARED_BYTES - rows - 8 * _block_e(num_experts)
    return min(product._MOST_STAGES, room // STAGE_BYTES.value)


def _part(num_hidden: int) -> int:
    return min(_PART, max(256, next_power_of_2(num_hidden)))


def _block_d(width: int) -> int:
    return max(256, next_power_of_2(width))


def _block_e(num_experts: int) -> int:
    return max(32, next_power_of_2(num_experts))


def _serves(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, num_rows: int, num_experts: int) -> bool:
    return (
        x_TD.shape[0] == 1
        and device_generation(x_TD) == 9
        and 0 < min(num_rows, w2_SDF.shape[0]) <= product._MOST_SLOTS
        and x_TD.dtype == w2_SDF.dtype
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and num_stages(*w2_SDF.shape[1:], num_experts) >= product._FEWEST_STAGES
        and tma_serves(x_TD, w13_S2FD)
        and tma_serves(x_TD, w2_SDF)
    )


def serves_undecided(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, num_experts: int, rule: RoutingRule) -> bool:
    """As kernels/experts_few.py, and one row of any F."""
    fits = rule.num_groups == 1 and rule.top_k <= product.UNROLLED.value and num_experts <= product._MOST_EXPERTS
    ours = fits and _serves(x_TD, w13_S2FD, w2_SDF, rule.top_k, num_experts)
    return ours or _SERVES(x_TD, w13_S2FD, w2_SDF, num_experts, rule)


def experts_row(
    x_TD: Tensor,
    w13_S2FD: Tensor,
    w2_SDF: Tensor,
    undecided: Undecided,
    shared: SharedExperts | None = None,
    *,
    second_rows: int = 32,
    guess: bool = True,
) -> FewRows:
    """`experts_few_undecided`; of one row by the kernel here. `guess`: weights are asked for by logits, too."""
    num_experts = undecided.parts_PTE.shape[2]
    num_rows = undecided.packed.packed_row_TK.numel()
    if not _serves(x_TD, w13_S2FD, w2_SDF, num_rows, num_experts):
        return _RUN(x_TD, w13_S2FD, w2_SDF, undecided, shared)
    width, num_hidden, rule = w2_SDF.shape[1], w2_SDF.shape[2], undecided.rule
    num_shared, rows = (0, num_rows) if shared is None else (shared.down_DF.shape[1], num_rows + 1)
    h, y = x_TD.new_empty(num_rows * num_hidden + num_shared), x_TD.new_empty(rows, width)
    kind = (rule.score == "sigmoid", rule.renormalize, _block_e(num_experts))
    experts_row_kernel[(num_multiprocessors(x_TD.device),)](
        x_TD,
        w13_S2FD,
        product._boxes(w13_S2FD.view(-1, width), 16),
        product._boxes(w2_SDF.view(-1, num_hidden), second_rows),
        None if shared is None else product._boxes(shared.gate_up_2FD, 16),
        None if shared is None else product._boxes(shared.down_DF, second_rows),
        undecided.packed.offsets_S1,
        undecided.parts_PTE,
        undecided.bias_E,
        undecided.real_T,
        undecided.slot_of_E,
        *undecided.routing,
        undecided.packed.packed_row_TK,
        undecided.packed.counters,
        h,
        y,
        num_rows,
        w2_SDF.shape[0],
        num_hidden,
        width,
        num_shared,
        rule.top_k,
        float(rule.epsilon),
        float(rule.scale),
        ROWS=second_rows,
        STAGES=num_stages(width, num_hidden, num_experts),
        BLOCK_S=max(32, next_power_of_2(w2_SDF.shape[0])),
        BLOCK_D=_block_d(width),
        PART=_part(num_hidden),
        CHOICE=(num_experts, undecided.parts_PTE.shape[0], rule.top_k, *kind),
        GUESS=guess and shared is None and undecided.bias_E is None,
        num_warps=4,
        maxnreg=120,  # room for programs of the launches before and after beside this one's
        **dependent_launch(x_TD),
    )
    return FewRows(y[:num_rows], None if shared is None else y[num_rows:])


def install() -> None:
    user.serves_undecided, user.experts_few_undecided = serves_undecided, experts_row


QWEN3 = {
    "32": experts_row,
    "64": partial(experts_row, second_rows=64),
    "32, no guess": partial(experts_row, guess=False),
}
SIGMOID = RoutingRule(top_k=6, score="sigmoid", epsilon=1e-20, scale=2.5)

SHAPES: dict[str, tuple[int, int, int, int, RoutingRule, bool, float, dict[str, Run]]] = {
    "qwen3": (128, 2048, 768, 0, RoutingRule(top_k=8), False, 1.0, QWEN3),
    "dsv2-lite": (64, 2048, 1408, 2816, RoutingRule(top_k=6, renormalize=False), False, 1.0, {"32": experts_row}),
    "mixtral": (8, 4096, 14336, 0, RoutingRule(top_k=2), False, 1.0, {"32": experts_row}),
    "nothing divides": (250, 1032, 72, 0, SIGMOID, True, 1.0, {"32": experts_row}),
    "most scores are zero": (128, 256, 128, 0, RoutingRule(top_k=8), False, 60.0, {"32": experts_row}),
}
"""experts, width, F, F of shared experts, rule, with a bias, how far logits lie apart, drafts"""


def cases(device: torch.device) -> Iterator[Case]:
    """Whole: router with norm, experts, weighted sum with norm; one row, whose experts are others each time."""
    on_gpu = device.type == "cuda"
    for seed, (name, (num_experts, width, hidden, shared, rule, with_bias, apart, runs)) in enumerate(SHAPES.items()):
        if not on_gpu:
            width, hidden, shared = width // 8 // 8 * 8, hidden // 8 // 8 * 8, shared // 8 // 8 * 8
        layer = drawn(device, seed, num_experts, width, hidden, shared, rule, apart, with_bias=with_bias)
        touched = 2 * width * (3 * hidden * rule.top_k + 3 * shared)
        rows = rotation_length(touched, least=6) if on_gpu else 2
        generator = torch.Generator(device).manual_seed(seed)
        xs = torch.randn(rows, 2, 1, width, device=device, generator=generator).to(layer.w2_SDF.dtype)
        forms = {"in use": [whole(layer, *x, _SERVES, _RUN) for x in xs]}
        forms |= {form: [whole(layer, *x, serves_undecided, run) for x in xs] for form, run in runs.items()}
        yield Case(name, forms)
        del layer, forms
