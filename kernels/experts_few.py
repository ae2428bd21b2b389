"""Both products of the experts of a few tokens in one launch, for compute capability 9 (H100, H200): weights never stop
coming.

Knows rows, slots and offsets as kernels/grouped_gemm.py does, whose two products are the definition. Between two
launches memory rests: until the last program of the first has ended and the second's weights are on their way. Here
one program lives on each multiprocessor, and one of its warps does nothing but ask for weights, in pieces: those of the
first product, then those of the second. Weights depend on nothing, so they come while rows of the first product are
still being summed.

Pieces are taken in turn by a counter, so that who waits (a piece of the second product, for its slot's rows) waits for
programs that run already, whatever else is on the GPU: no number of programs has to fit at once. The launch that packs
the rows has set the counters to zero.

The router may leave the choice of experts to this launch (`Undecided`): every program then chooses for itself, which
takes less time than to wait for the one program that sees all, and for what it has written.

Shared experts, to which every row goes, may come along. Their pieces are no one's choice and come first: weights flow
while the experts are chosen.

One row alone (ONE) is copied and chosen for without seven beside it, and its h comes in parts: it may be of any width.

The sums over K ascend, unsplit, in one fp32 accumulator, as in every other kernel here: the bits are the same.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.barriers import barriers
from kernels.checks import next_power_of_2
from kernels.combine import UNROLLED
from kernels.dependent_launch import dependent_launch
from kernels.experts_few_choose import WARPS
from kernels.experts_few_feed import BOXES, GROUPS, feed
from kernels.experts_few_multiply import HALVES, multiply
from kernels.experts_few_room import FEWEST_STAGES, block_d, block_e, block_f, num_stages, second_rows
from kernels.gate_few import Undecided
from kernels.grouped_gemm_tma import tma_serves
from kernels.routing import RoutingRule
from kernels.row_tiles import slot_step
from kernels.tiles import device_generation, num_multiprocessors


class SharedExperts(NamedTuple):
    """The weights of the experts that every row goes to, as one MLP."""

    gate_up_2FD: Tensor
    down_DF: Tensor


class FewRows(NamedTuple):
    """What experts made of few rows: y_RD of those chosen, and of those shared, where they came along."""

    y_RD: Tensor
    shared_TD: Tensor | None


FEW_TOKENS = 8
"""At most: the columns of the tensor core's smallest tile. Measured on an H200, us a layer in graphs, two launches /
this one: qwen3 1 row 49.7 / 47.9, 2 rows 69.4 / 63.7, 4 rows 98.4 / 94.1, 8 rows 148.4 / 144.8; dsv2-lite 1 row 69.0 /
67.7, 4 rows 118.4 / 117.7, 8 rows 162.4 / 161.7. In another run, the router choosing / this launch: qwen3 1 row 48.4 /
45.9, 2 rows 64.5 / 61.9, 4 rows 95.0 / 93.1; dsv2-lite 1 row 68.9 / 68.4, 4 rows 119.1 / 119.3."""

MOST_SLOTS = 64
"""With rows at once: each has a counter."""

_MOST_EXPERTS = 256
"""That are chosen among: eight places a lane."""


# y[r] = w2[s] h[r], h[r] = silu(gate x) * (up x) with w13[s] of x[token[r]], s the slot whose rows hold r
#   x_ptr [T, D], T at most 8, rows strided by groups of 8 values; w13_desc [S * 2F, D] in blocks of [16, 64], w2_desc
#   [S * D, F] in blocks of [ROWS, 64]; offsets_ptr int32 [S + 1]; token_ptr int32 [R], a token at most once in a slot;
#   counters_ptr int32 [NUM_COUNTERS], zero; h_ptr [R, F], y_ptr [R, D]
#   s13_desc [2 F', D], s2_desc [D, F'] or None: shared experts, to which token t goes with row t of h' [T, F'] and y'
#   [T, D], which lie behind h and y
#   grid (multiprocessors,): a program takes pieces while there are any, see the header. fp32 accumulation, h and y cast
#   once. Rows of no slot are neither read nor written; D and F are filled up with zeros.
#   ONE: T is 1, and a row of h comes in parts of BLOCK_F; of more tokens those of routed experts come whole, and ROWS
#   is 64
#   CHOICE, (experts, parts, top k, sigmoid, renormalize, BLOCK_E), and token_ptr None: row t * K + k of h and y is that
#   of choice k of token t, T at most WARPS, and this launch chooses: from parts_ptr fp32 [P, T, E], bias_ptr fp32 [E]
#   or None, real_ptr bool [T] or None, slot_of_ptr int32 [E]; it writes ids_ptr, packed_row_ptr int32 and weights_ptr
#   fp32 [T, K], and the offsets


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@gluon.jit(do_not_specialize=["num_tokens", "num_rows", "num_slots", "top_k"])
def experts_few_kernel(
    x_ptr,
    w13_desc,
    w2_desc,
    s13_desc,
    s2_desc,
    offsets_ptr,
    token_ptr,
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
    num_tokens,
    num_rows,
    num_slots,
    num_hidden,
    num_columns,
    num_shared,
    stride_x8,
    top_k,
    epsilon,
    scale,
    ONE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_F: gl.constexpr,
    CHOICE: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = w13_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    # Every piece takes a stage at least: so many turns later its note has been read.
    PLACES: gl.constexpr = STAGES + 2 * GROUPS
    # Room behind the last stage, for the rows that the tensor core reads in vain.
    ws = gl.allocate_shared_memory(dtype, [STAGES * BOXES + 2, 16, 64], SWIZZLED)
    xs = gl.allocate_shared_memory(dtype, [8, BLOCK_D], SWIZZLED)
    hs = gl.allocate_shared_memory(dtype, [GROUPS * HALVES if ONE else GROUPS, 8, BLOCK_F], SWIZZLED)
    swaps = gl.allocate_shared_memory(gl.float32, [GROUPS, 64, 8], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [PLACES, 32], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    full, empty = barriers(STAGES, (1, 1))
    (noted,) = barriers(PLACES, (1,))
    if ONE:
        num_tokens = num_tokens * 0 + 1  # for the compiler to see
    undecided, handed = None, None
    if CHOICE is not None:
        keys = gl.allocate_shared_memory(gl.int32, [1 if ONE else WARPS, CHOICE[5]], PLAIN)
        choices = gl.allocate_shared_memory(gl.int32, [1 if ONE else WARPS, CHOICE[5]], PLAIN)
        keys_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        choices_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(keys_there, count=1)
        mbarrier.init(choices_there, count=1)
        handed = (keys, keys_there, choices, choices_there)
        given, out = (parts_ptr, bias_ptr, real_ptr, slot_of_ptr), (ids_ptr, weights_ptr, packed_row_ptr)
        undecided = (given, out, num_tokens, top_k, epsilon, scale)
    fence_async_shared()
    sizes = (num_slots, num_hidden, num_columns, num_shared, num_rows)
    ring, board = (ws, full, empty), (notes, noted)
    rows = (x_ptr, token_ptr, h_ptr, y_ptr, num_tokens, stride_x8, xs, hs, swaps)
    weights = (w13_desc, w2_desc, s13_desc, s2_desc)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                rows, undecided, handed, counters_ptr, sizes, ring, board, ONE, ROWS, STAGES, PLACES, CHOICE, PDL, 0,
            )),
            (multiply, (
                rows, undecided, handed, counters_ptr, sizes, ring, board, ONE, ROWS, STAGES, PLACES, CHOICE, PDL, 1,
            )),
            (feed, (
                weights, offsets_ptr, undecided, handed, counters_ptr, sizes, ring, board, num_tokens, ROWS,
                STAGES, PLACES, BLOCK_S, CHOICE, PDL,
            )),
        ],
        [4, 1],
        [120, 64],
    )
    # fmt: on


def serves_few_tokens(
    x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, offsets_S1: Tensor, token_R: Tensor, num_rows: int
) -> bool:
    """Whether this kernel takes these operands: gathered rows of few tokens, of 16 bits, on Hopper, and eight rows of x
    and, of more tokens than one, of h fit into shared memory beside the weights."""
    return slot_step(offsets_S1) == 1 and _serves(x_TD, w13_S2FD, w2_SDF, num_rows)


def serves_undecided(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, num_experts: int, rule: RoutingRule) -> bool:
    """Whether this kernel can choose, too, among so many experts: by a rule without groups, a row in each of four
    warps, and no more experts a row than `combine_norm` asks for at once."""
    return chooses(x_TD.shape[0], num_experts, rule) and _serves(
        x_TD, w13_S2FD, w2_SDF, x_TD.shape[0] * rule.top_k, num_experts
    )


def chooses(num_tokens: int, num_experts: int, rule: RoutingRule) -> bool:
    """Whether a launch like this one can choose by such a rule, whatever its weights."""
    return (
        num_tokens <= WARPS.value
        and rule.num_groups == 1
        and rule.top_k <= UNROLLED.value
        and num_experts <= _MOST_EXPERTS
    )


def takes_along(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, num_rows: int, shared: SharedExperts) -> bool:
    """Whether the launch of these rows takes shared experts along: rows of h come in parts, so they may be wider.

    Measured on an H200, us a layer of dsv2-lite in graphs, beside it on a second stream / along: 1 row 66.2 / 63.1, 2
    rows 85.0 / 81.2, 4 rows 120.0 / 115.8, 8 rows 167.5 / 164.2."""
    served = _serves(x_TD, w13_S2FD, w2_SDF, num_rows)
    return served and all(x_TD.dtype == w.dtype and tma_serves(x_TD, w) for w in shared)


def _serves(x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, num_rows: int, num_experts: int = 0) -> bool:
    return (
        0 < x_TD.shape[0] <= FEW_TOKENS
        and device_generation(x_TD) == 9
        and 0 < min(num_rows, w2_SDF.shape[0]) <= MOST_SLOTS
        and x_TD.dtype == w2_SDF.dtype
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and num_stages(x_TD.shape[0], *w2_SDF.shape[1:], num_experts) >= FEWEST_STAGES
        and tma_serves(x_TD, w13_S2FD)
        and tma_serves(x_TD, w2_SDF)
    )


def experts_few(
    x_TD: Tensor,
    w13_S2FD: Tensor,
    w2_SDF: Tensor,
    offsets_S1: Tensor,
    token_R: Tensor,
    num_rows: int,
    counters: Tensor,
    shared: SharedExperts | None = None,
) -> FewRows:
    """y_RD: `grouped_gemm` with w2 of `grouped_gemm_swiglu` with w13 of the rows x[token], where `serves_few_tokens`.
    Unlike there, a token comes at most once in a slot. `counters`, zeros, are used up: they serve one launch."""
    return _launch(x_TD, w13_S2FD, w2_SDF, offsets_S1, token_R, num_rows, counters, None, shared)


def experts_few_undecided(
    x_TD: Tensor, w13_S2FD: Tensor, w2_SDF: Tensor, undecided: Undecided, shared: SharedExperts | None = None
) -> FewRows:
    """The same of rows whose experts are still to be chosen, where `serves_undecided`: fills what `undecided` leaves
    open. Row t * K + k of y is that of choice k of token t."""
    offsets_S1, counters = undecided.packed.offsets_S1, undecided.packed.counters
    assert counters is not None, "what is undecided has counters"
    assert x_TD.shape[0] <= WARPS.value, f"{x_TD.shape[0]} rows: a row is chosen for in each of {WARPS.value} warps"
    num_rows = undecided.packed.packed_row_TK.numel()
    return _launch(x_TD, w13_S2FD, w2_SDF, offsets_S1, None, num_rows, counters, undecided, shared)


def _launch(
    x_TD: Tensor,
    w13_S2FD: Tensor,
    w2_SDF: Tensor,
    offsets_S1: Tensor,
    token_R: Tensor | None,
    num_rows: int,
    counters: Tensor,
    undecided: Undecided | None,
    shared: SharedExperts | None,
) -> FewRows:
    (num_tokens, width), (num_slots, _, num_hidden) = x_TD.shape, w2_SDF.shape
    num_shared, rows = (0, num_rows) if shared is None else (shared.down_DF.shape[1], num_rows + num_tokens)
    # Rows of the shared experts lie behind all others.
    h, y = x_TD.new_empty(num_rows * num_hidden + num_tokens * num_shared), x_TD.new_empty(rows, width)
    of_choice = choice_operands(undecided)
    num_programs = num_multiprocessors(x_TD.device)
    piece = second_rows(num_tokens, rows, width, num_programs)
    experts_few_kernel[(num_programs,)](
        x_TD,
        _boxes(w13_S2FD.view(-1, width), 16),
        _boxes(w2_SDF.view(-1, num_hidden), piece),
        None if shared is None else _boxes(shared.gate_up_2FD, 16),
        None if shared is None else _boxes(shared.down_DF, piece),
        offsets_S1,
        token_R,
        *of_choice.tables,
        counters,
        h,
        y,
        num_tokens,
        num_rows,
        num_slots,
        num_hidden,
        width,
        num_shared,
        x_TD.stride(0) // 8,
        *of_choice.numbers,
        ONE=num_tokens == 1,
        ROWS=piece,
        STAGES=num_stages(num_tokens, width, num_hidden, of_choice.num_experts),
        BLOCK_S=max(32, next_power_of_2(num_slots)),
        BLOCK_D=block_d(width),
        BLOCK_F=block_f(num_tokens, num_hidden),
        CHOICE=of_choice.kind,
        num_warps=4,
        maxnreg=120,  # room for programs of the launches before and after beside this one's
        **dependent_launch(x_TD),
    )
    return FewRows(y[:num_rows], None if shared is None else y[num_rows:])


class ChoiceOperands(NamedTuple):
    """What a launch that chooses is given beside its rows and weights; of one that does not, nothing."""

    tables: tuple[Tensor | None, ...]
    numbers: tuple[int, float, float]
    num_experts: int
    kind: tuple[Any, ...] | None
    """CHOICE of the kernel."""


def choice_operands(undecided: Undecided | None) -> ChoiceOperands:
    """Of rows whose experts are still to be chosen; None: they are chosen."""
    if undecided is None:
        return ChoiceOperands((None,) * 7, (0, 0.0, 0.0), 0, None)
    rule, (num_parts, _, num_experts) = undecided.rule, undecided.parts_PTE.shape
    given = (undecided.parts_PTE, undecided.bias_E, undecided.real_T, undecided.slot_of_E)
    return ChoiceOperands(
        (*given, *undecided.routing, undecided.packed.packed_row_TK),
        (rule.top_k, float(rule.epsilon), float(rule.scale)),
        num_experts,
        (num_experts, num_parts, rule.top_k, rule.score == "sigmoid", rule.renormalize, block_e(num_experts)),
    )


def _boxes(w_NK: Tensor, num_rows: int) -> TensorDescriptor:
    """As the copy engine brings them and the tensor core reads them."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(w_NK, list(w_NK.shape), list(w_NK.stride()), [num_rows, 64], layout)
