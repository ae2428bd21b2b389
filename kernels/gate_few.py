"""The router of a few rows in one launch: logits, choice and packing, where three launches would mostly wait.

Knows rows, gate weights, the rule and where experts live; knows nothing of experts' weights. It is defined by the
kernels it stands for (gate.py, routing.py, pack.py): the same parts of K, summed in the same order, and the same
choice, so the same bits.

Programs multiply the parts of K side by side and count themselves. The last one sees all parts: it sums them, chooses
and packs, and sets the counter back to zero for the next launch. The norm before the router may come along: then every
program normalises its rows whole, in the tile of rmsnorm.py, and the first one writes them.

Where the launch of the experts can choose (experts_few.py), this one ends with the parts: nobody waits for its last
program then.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import cdiv, next_power_of_2, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gate import PART, check_operands, gate, gate_reference, load_w, load_x
from kernels.gate_few_decide import decide
from kernels.pack import NUM_COUNTERS, Packed, check_num_slots, clear_counters, pack, pack_reference
from kernels.rmsnorm import Norm, add_residual, check_residual, norm_tile, rms_apply, rms_scale, rmsnorm_residual
from kernels.routing import Routing, RoutingRule, choice_of

FEW_ROWS = 8
"""The most that one program routes."""

_FEW_CHOICES = 32
"""The most of all rows together, both filled up to powers of two: packing compares each with each.

On an H200, microseconds of a whole layer, three launches and one: 128 experts, top 8, one row 70.4 and 61.9, two 90.7
and 78.3, four 112.7 and 112.1, eight 162.1 and 164.3; 64 experts, top 6, one row 89.1 and 87.5, four 144.9 and 144.0,
eight 189.0 and 189.6; 8 experts, top 2, one row 216.8 and 214.8, eight 642.6 and 640.8.
"""

_ROWS = tl.constexpr(16)
"""Of the product's tile: the fewest that a tensor core takes."""


def gate_and_pack(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None = None,
    counter_1: Tensor | None = None,
) -> tuple[Routing, Packed]:
    """`gate`, and `pack` of the ids it chose. counter_1 int32 [1], zero, and zero again when the kernel is done;
    without it three launches do it. `gate_and_pack_reference` is the definition."""
    operands = (x_TD, weight_ED, bias_E, rule)
    if not uses_triton(x_TD):
        return gate_and_pack_reference(*operands, slot_of_E, num_slots, real_T=real_T)
    few = serves(x_TD.shape[0], rule.top_k) and x_TD.dtype == weight_ED.dtype != torch.float32
    if few and counter_1 is not None:
        return gate_and_pack_triton(*operands, slot_of_E, num_slots, real_T=real_T, counter_1=counter_1)
    routing = gate(*operands, real_T=real_T)
    return routing, pack(routing.expert_ids_TK, slot_of_E, num_slots)


class Undecided(NamedTuple):
    """What is left to the launch of the experts: to sum the parts of the logits and to choose. It fills `routing` and
    `packed`, but for the tokens of rows, which lie in the order of choices: row t * K + k is choice k of token t."""

    parts_PTE: Tensor
    bias_E: Tensor | None
    rule: RoutingRule
    slot_of_E: Tensor
    real_T: Tensor | None
    routing: Routing
    packed: Packed


class NormedRouting(NamedTuple):
    """The rows that were routed: their norm and the new residual, and what `gate_and_pack` or `leave_open` makes of the
    former."""

    y_TD: Tensor
    new_residual_TD: Tensor
    routing: Routing
    packed: Packed | Undecided


def norm_gate_and_pack(
    x_TD: Tensor,
    residual_TD: Tensor,
    norm: Norm,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None = None,
    counter_1: Tensor,
) -> NormedRouting:
    """`rmsnorm_residual` and `gate_and_pack` of its rows, in one launch where few enough are routed."""
    operands = (weight_ED, bias_E, rule, slot_of_E, num_slots)
    if uses_triton(x_TD) and norm_serves(x_TD, rule.top_k) and x_TD.dtype == weight_ED.dtype:
        given = (x_TD, residual_TD, norm, *operands)
        return norm_gate_and_pack_triton(*given, real_T=real_T, counter_1=counter_1)
    y_TD, new_residual_TD = rmsnorm_residual(x_TD, residual_TD, *norm)
    routed = gate_and_pack(y_TD, *operands, real_T=real_T, counter_1=counter_1)
    return NormedRouting(y_TD, new_residual_TD, *routed)


_NORM_ENTRIES = 8192
"""Of all rows together at most: every program reads them all."""


def norm_serves(x_TD: Tensor, top_k: int) -> bool:
    """Whether the norm comes along: not of so many entries, and where rows lie in the threads as they do in rmsnorm.py
    whatever their number (see `tile_of_many` there)."""
    return serves(x_TD.shape[0], top_k) and _norm_fits(x_TD)


def _norm_fits(x_TD: Tensor) -> bool:
    num_tokens, width = x_TD.shape
    rows, block_c, _ = norm_tile(width)
    return (
        x_TD.dtype != torch.float32
        and rows == 1
        and next_power_of_2(num_tokens) * block_c <= _NORM_ENTRIES
        and width % 16 == 0
    )


def serves(num_tokens: int, top_k: int) -> bool:
    """Whether one launch takes so many rows with so many choices each."""
    return 0 < num_tokens <= FEW_ROWS and _block_t(num_tokens) * next_power_of_2(top_k) <= _FEW_CHOICES


def _block_t(num_tokens: int, num_warps: int = 4) -> int:
    """As many rows as warps at least: so a row lies in one warp, which finds its best without shared memory."""
    return max(num_warps, next_power_of_2(num_tokens))


# Parts of the logits as in gate.py, choice as in routing.py, places as in pack.py.
#   x_ptr [T, K], w_ptr [E, K], rows strided; parts_ptr fp32 [P, T, E]; counter_ptr int32, zero; bias_ptr fp32 [E] or
#   None; real_ptr bool [T] or None; slot_of_ptr int32 [E]; ids_ptr, packed_row_ptr int32 and weights_ptr fp32
#   [T, TOP_K]; row_token_ptr int32 [T * TOP_K]; offsets_ptr int32 [S + 1]; counters_ptr int32 [NUM_COUNTERS];
#   residual_ptr [T, K], rows strided, or None: rows are those of y = norm(x + residual), with norm_ptr [K], and y_ptr,
#   sum_ptr (the new residual) [T, K] take them
#   grid (cdiv(E, BLOCK_N), P): a program owns a tile of [T, E] and one part; the last to end routes and packs, T <=
#   block_t of CHOICE (expert_choice.py); without counter_ptr nobody does. fp32 accumulation; rows, experts and columns
#   beyond the last are read as zero.


@triton.jit
def _rows_of(scale, row, ROWS: tl.constexpr):
    """scale [ROWS, 1] for the rows of another tile, [:, 1]; zero for those beyond. One by one as scalars: else the
    tile that is multiplied takes the layout in which these lie, a whole row in each thread."""
    out = tl.zeros((row.shape[0], 1), tl.float32)
    for r in tl.static_range(ROWS):
        one = tl.where(tl.arange(0, ROWS)[:, None] == r, scale, 0.0)
        out = tl.where(row[:, None] == r, tl.sum(tl.sum(one, axis=1), axis=0), out)
    return out


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@triton.jit(do_not_specialize=["num_tokens"])
def _gate_few_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    y_ptr,
    sum_ptr,
    w_ptr,
    parts_ptr,
    counter_ptr,
    bias_ptr,
    real_ptr,
    slot_of_ptr,
    ids_ptr,
    weights_ptr,
    row_token_ptr,
    packed_row_ptr,
    offsets_ptr,
    counters_ptr,
    num_tokens,
    width,
    stride_x,
    stride_residual,
    stride_w,
    num_slots,
    eps,
    epsilon,
    scale,
    NUM_PARTS: tl.constexpr,
    CHOICE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    NORM_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, column = tl.arange(0, _ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * PART
    # Weights are no work of this step: they are asked for while the kernels before this one still run.
    w = load_w(w_ptr, column, first, CHOICE.num_experts, width, stride_w, PART)  # pyright: ignore
    if residual_ptr is not None:
        # So are the residual, which is older than the launch before, and the norm's weight.
        token_of_row, d = tl.arange(0, NORM_ROWS)[:, None], tl.arange(0, NORM_COLUMNS)[None, :]
        used = (token_of_row < num_tokens) & (d < width)
        residual = tl.load(residual_ptr + token_of_row * stride_residual + d, mask=used, other=0.0)
        norm = tl.load(norm_ptr + d, mask=d < width, other=0.0)
        part_residual = load_x(residual_ptr, row, first, num_tokens, width, stride_residual, PART)  # pyright: ignore
        k = first + tl.arange(0, PART)[None, :]
        part_norm = tl.load(norm_ptr + k, mask=k < width, other=0.0)
    wait_for_inputs(PDL)
    if tl.program_id(0) + tl.program_id(1) == 0:
        clear_counters(counters_ptr)
    x = load_x(x_ptr, row, first, num_tokens, width, stride_x, PART)  # pyright: ignore
    if residual_ptr is not None:
        whole = tl.load(x_ptr + token_of_row * stride_x + d, mask=used, other=0.0)
        whole = add_residual(whole, residual)
        root = rms_scale(whole, width, eps)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(sum_ptr + token_of_row * width + d, whole, mask=used)
            tl.store(y_ptr + token_of_row * width + d, rms_apply(whole, root, norm), mask=used)
        x = rms_apply(add_residual(x, part_residual), _rows_of(root, row, NORM_ROWS), part_norm)  # pyright: ignore
    part = tl.dot(x, w, tl.zeros((_ROWS, BLOCK_N), tl.float32), input_precision="ieee")
    part_ptr = parts_ptr + (tl.program_id(1) * num_tokens + row)[:, None] * CHOICE.num_experts + column[None, :]
    tl.store(part_ptr, part, mask=(row < num_tokens)[:, None] & (column < CHOICE.num_experts)[None, :])
    if counter_ptr is not None:
        # All threads have written when the program counts itself; who comes last sees what the others wrote before.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") < tl.num_programs(0) * tl.num_programs(1) - 1:
            return
        tl.store(counter_ptr, 0)
        given, packed = (bias_ptr, real_ptr, slot_of_ptr), (row_token_ptr, packed_row_ptr, offsets_ptr)
        routing, numbers = (ids_ptr, weights_ptr), (num_tokens, num_slots, epsilon, scale)
        decide(parts_ptr, given, routing, packed, numbers, NUM_PARTS, BINS, CHOICE)


def gate_and_pack_triton(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None = None,
    counter_1: Tensor,
) -> tuple[Routing, Packed]:
    """`gate_and_pack` of at most FEW_ROWS rows as one launch."""
    operands = (weight_ED, bias_E, rule, slot_of_E, num_slots)
    *_, undecided = _launch(x_TD, None, None, *operands, real_T=real_T, counter_1=counter_1)
    return undecided.routing, undecided.packed


def norm_gate_and_pack_triton(
    x_TD: Tensor,
    residual_TD: Tensor,
    norm: Norm,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None = None,
    counter_1: Tensor,
) -> NormedRouting:
    """`norm_gate_and_pack` of rows that `norm_serves`, as one launch."""
    check_residual(x_TD, residual_TD)
    operands = (weight_ED, bias_E, rule, slot_of_E, num_slots)
    *rows, undecided = _launch(x_TD, residual_TD, norm, *operands, real_T=real_T, counter_1=counter_1)
    return NormedRouting(*rows, undecided.routing, undecided.packed)


def leave_open(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm: Norm | None,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None = None,
) -> NormedRouting:
    """`norm_gate_and_pack`, or without a norm `gate_and_pack`, of as many rows as a tile has at most, but for what
    `Undecided` leaves open."""
    operands = (weight_ED, bias_E, rule, slot_of_E, num_slots)
    if norm is not None and residual_TD is not None and not _norm_fits(x_TD):
        y_TD, new_residual_TD = rmsnorm_residual(x_TD, residual_TD, *norm)
        *_, undecided = _launch(y_TD, None, None, *operands, real_T=real_T, counter_1=None)
    else:
        given = (x_TD, residual_TD, norm, *operands)
        y_TD, new_residual_TD, undecided = _launch(*given, real_T=real_T, counter_1=None)
    return NormedRouting(y_TD, new_residual_TD, undecided.routing, undecided)


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm: Norm | None,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None,
    counter_1: Tensor | None,
) -> tuple[Tensor, Tensor, Undecided]:
    """(rows, new residual, what was routed): all of it, or, without a counter, what is undecided."""
    check_operands(x_TD, weight_ED, bias_E, rule, real_T)
    check_num_slots(num_slots)
    (num_tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    few = num_tokens <= _ROWS.value if counter_1 is None else serves(num_tokens, rule.top_k)
    assert few, f"{num_tokens} rows with {rule.top_k} choices are not few"
    given = (slot_of_E.shape, slot_of_E.dtype, slot_of_E.device)
    assert given == ((num_experts,), torch.int32, x_TD.device), f"slot_of_E is {given}"
    if counter_1 is not None:
        given = (counter_1.dtype, counter_1.device)
        assert given == (torch.int32, x_TD.device), f"counter_1 is {given}"
    num_parts, device = cdiv(width, PART), x_TD.device
    parts_PTE = torch.empty((num_parts, num_tokens, num_experts), dtype=torch.float32, device=device)
    ids_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=device)
    routing = Routing(ids_TK, torch.empty(ids_TK.shape, dtype=torch.float32, device=device))
    sizes = (ids_TK.numel(), ids_TK.shape, num_slots + 1, NUM_COUNTERS.value)
    packed = Packed(*(ids_TK.new_empty(size) for size in sizes))
    y_TD, new_residual_TD, num_warps = x_TD, x_TD, 4
    if norm is not None:
        y_TD, new_residual_TD, num_warps = *x_TD.new_empty(2, *x_TD.shape), norm_tile(width)[2]
    choice = choice_of(rule, num_experts)._replace(block_t=_block_t(num_tokens, num_warps))
    block_n = max(16, min(32, next_power_of_2(num_experts)))
    _gate_few_kernel[(cdiv(num_experts, block_n), num_parts)](
        x_TD,
        residual_TD,
        None if norm is None else norm.weight_C,
        y_TD,
        new_residual_TD,
        weight_ED,
        parts_PTE,
        counter_1,
        bias_E,
        real_T,
        slot_of_E,
        *routing,
        *packed,
        num_tokens,
        width,
        x_TD.stride(0),
        0 if residual_TD is None else residual_TD.stride(0),
        weight_ED.stride(0),
        num_slots,
        0.0 if norm is None else norm.eps,
        float(rule.epsilon),
        float(rule.scale),
        NUM_PARTS=num_parts,
        CHOICE=choice,
        BLOCK_N=block_n,
        BINS=next_power_of_2(num_slots + 1),
        PART=PART,
        NORM_ROWS=1 if norm is None else next_power_of_2(num_tokens),
        NORM_COLUMNS=next_power_of_2(width),
        num_warps=num_warps,
        num_stages=1,
        **dependent_launch(x_TD),
    )
    undecided = Undecided(parts_PTE, bias_E, rule, slot_of_E, real_T, routing, packed)
    return y_TD, new_residual_TD, undecided


def gate_and_pack_reference(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    rule: RoutingRule,
    slot_of_E: Tensor,
    num_slots: int,
    *,
    real_T: Tensor | None = None,
) -> tuple[Routing, Packed]:
    """The definition, and the CPU's product path."""
    routing = gate_reference(x_TD, weight_ED, bias_E, rule, real_T=real_T)
    return routing, pack_reference(routing.expert_ids_TK, slot_of_E, num_slots)
