"""Both products of the routed experts of few tokens in one launch, with weights in fp8, for compute capability 9 (H100,
H200): kernels/experts_few.py, which says how, with other weights.

In the place of quantising, the first product, quantising and the second product (grouped_gemm_fp8.py, quantize.py).
Knows rows, slots and the router's parts of logits, no shared experts, which are in bf16. What differs from bf16:
- Three groups of warps. A piece is half the bytes, but as many instructions wait on each other in it.
- x is quantised by every program while its first weights come: no launch, and no wait for one.
- Rows of h lie in memory rounded, not quantised; who needs a slot's rows quantises them for itself. So pieces of a
  first product stay 16 columns wide: of 128, which could write scales, one token has 48 for 132 programs.
- Scales of weights come with the stage they belong to, by copies of four bytes that the stage's barrier counts.
- Offsets and the first piece's number are asked for together: a wait less before the first weights.
- A step of 128 columns is summed from zero, all steps of a stage at once, and added in order by its scales: the bits
  of the many-row products.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.barriers import barriers
from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch
from kernels.experts_few import FEW_TOKENS, MOST_SLOTS, choice_operands, chooses
from kernels.experts_few_choose import WARPS
from kernels.experts_few_feed import STAGE_BYTES
from kernels.experts_few_fp8_feed import BOX, GROUPS, LANES_THERE, ROWS, SCALES, feed
from kernels.experts_few_fp8_multiply import BATCH, multiply
from kernels.experts_few_room import block_e
from kernels.gate_few import Undecided
from kernels.grouped_gemm_specialized import descriptor
from kernels.grouped_gemm_tma import tma_serves
from kernels.quantize import FP8, GROUP, QuantizedBlocks
from kernels.routing import RoutingRule
from kernels.row_tiles import slot_step
from kernels.tiles import device_generation, num_multiprocessors

_MOST_STAGES, _FEWEST_STAGES = 11, 6
"""Six are dsv3's."""

_MOST_HIDDEN, _MOST_BYTES = 2048, 16 << 20
"""Columns of h, and bytes of an expert where there are more than four tokens. One H200, us a layer in graphs, by four
launches / in one; with the router's choice in brackets, too, which this launch makes by itself:
- qwen3 (F = 768, 4.7 MB) 1 token 21.6 / 19.6 (24.9 / 21.0), 2 tokens 30.2 / 27.6 (34.4 / 30.6), 4 tokens 44.4 / 41.3
  (47.9 / 47.8), 8 tokens 71.2 / 66.1
- 60 experts, 4 a token, D = 2896, F = 1424 (12.4 MB) 25.9 / 22.8, 37.3 / 32.9, 57.6 / 51.2, 103.7 / 84.9
- dsv3-ep8 (2048, 44 MB) 91.2 / 91.8, 153.0 / 149.2, 241.1 / 232.7, 308 / 316
- mixtral (14336, 176 MB), h in parts and pieces of 32 rows, 92.5 / 108.0, 8 tokens 322 / 389"""

_ROOM = 213 << 10
"""Bytes of a program for its stages, rows and choices: all but barriers, notes and exchanged sums."""


# y[r] = w2[s] q(h[r]), h[r] = silu(gate q(x)) * (up q(x)) with w13[s] of x[token[r]], s the slot whose rows hold r; q
# quantises a row by 128 columns as kernels/quantize.py does, h is cast to y's type before
#   x_ptr [T, D], T at most 8, rows strided by groups of 8 values; w13_desc e4m3 [S * 2F, D] in blocks of [16, 128],
#   w2_desc [S * D, F] in blocks of [64, 128]; w13_scale_ptr fp32 [S, 2, ceil(F / 128), ceil(D / 128)], w2_scale_ptr
#   [S, 1, ceil(D / 128), ceil(F / 128)]; the rest as in experts_few.py
#   grid (multiprocessors,): a program takes pieces while there are any. fp32 accumulation. Rows of no slot are neither
#   read nor written; D and F are filled up with zeros.


# Sizes of the batch are not specialised on: a kernel compiled in the middle of a run would stall it.
@gluon.jit(do_not_specialize=["num_tokens", "num_slots", "top_k"])
def experts_few_fp8_kernel(
    x_ptr,
    w13_desc,
    w13_scale_ptr,
    w2_desc,
    w2_scale_ptr,
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
    num_slots,
    num_hidden,
    width,
    stride_x8,
    top_k,
    epsilon,
    scale,
    STAGES: gl.constexpr,
    X_BATCHES: gl.constexpr,
    H_BATCHES: gl.constexpr,
    BLOCK_S: gl.constexpr,
    CHOICE: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = w13_desc.dtype
    CHUNKS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # Every piece takes a stage at least: so many turns later its note has been read.
    PLACES: gl.constexpr = STAGES + 2 * GROUPS
    # Room behind the last stage, for the rows that the tensor core reads in vain.
    ws = gl.allocate_shared_memory(dtype, [STAGES * (STAGE_BYTES // BOX) + 2, 16, 128], CHUNKS)
    ss = gl.allocate_shared_memory(gl.float32, [STAGES, SCALES, 1], PLAIN)
    xs = gl.allocate_shared_memory(dtype, [X_BATCHES * BATCH, 8, 128], CHUNKS)
    x_scales = gl.allocate_shared_memory(gl.float32, [X_BATCHES * BATCH, 8], LINE)
    hs = gl.allocate_shared_memory(dtype, [GROUPS * H_BATCHES * BATCH, 8, 128], CHUNKS)
    h_scales = gl.allocate_shared_memory(gl.float32, [GROUPS * H_BATCHES * BATCH, 8], LINE)
    swaps = gl.allocate_shared_memory(gl.float32, [GROUPS, 64, 8], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [PLACES, 32], LINE)
    full, empty = barriers(STAGES, (LANES_THERE, 1))
    (noted,) = barriers(PLACES, (1,))
    x_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(x_there, count=GROUPS if CHOICE is None else GROUPS - 1)
    undecided, handed = None, None
    if CHOICE is not None:
        keys = gl.allocate_shared_memory(gl.int32, [WARPS, CHOICE[5]], PLAIN)
        choices = gl.allocate_shared_memory(gl.int32, [WARPS, CHOICE[5]], PLAIN)
        keys_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        choices_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(keys_there, count=1)
        mbarrier.init(choices_there, count=1)
        handed = (keys, keys_there, choices, choices_there)
        given, out = (parts_ptr, bias_ptr, real_ptr, slot_of_ptr), (ids_ptr, weights_ptr, packed_row_ptr)
        undecided = (given, out, num_tokens, top_k, epsilon, scale)
    fence_async_shared()
    sizes = (num_slots, num_hidden, width)
    ring, board = (ws, ss, full, empty), (notes, noted)
    rows = (x_ptr, token_ptr, h_ptr, y_ptr, num_tokens, stride_x8)
    kept = ((xs, x_scales, x_there), (hs, h_scales), swaps)
    weights = ((w13_desc, w13_scale_ptr), (w2_desc, w2_scale_ptr))
    given = (rows, undecided, handed, counters_ptr, sizes, kept, ring, board)
    gl.warp_specialize(
        [
            (multiply, (given, STAGES, PLACES, CHOICE, PDL, 0)),
            (multiply, (given, STAGES, PLACES, CHOICE, PDL, 1)),
            (multiply, (given, STAGES, PLACES, CHOICE, PDL, 2)),
            (feed, (weights, offsets_ptr, given, STAGES, PLACES, BLOCK_S, CHOICE, PDL)),
        ],
        [4, 4, 1],
        [96, 96, 64],
    )


def num_stages(width: int, num_hidden: int, num_experts: int = 0) -> int:
    """Of 16 KiB: as many as fit beside the rows of x, those of h that each group has, and what is handed over of so
    many experts that are chosen in the launch.

    >>> num_stages(2048, 768), num_stages(7168, 2048), num_stages(2048, 768, 128)
    (10, 6, 10)
    """
    rows = (_batches(width) + GROUPS.value * _batches(num_hidden)) * BATCH.value * 8 * (GROUP + 4)
    choice = 8 * WARPS.value * block_e(num_experts) if num_experts else 0
    return min(_MOST_STAGES, (_ROOM - rows - choice) // STAGE_BYTES.value)


def _batches(columns: int) -> int:
    return cdiv(cdiv(columns, GROUP), BATCH.value)


def serves_few_tokens_fp8(
    x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, offsets_S1: Tensor, num_rows: int
) -> bool:
    """As `kernels.experts_few.serves_few_tokens`, of weights in fp8."""
    return slot_step(offsets_S1) == 1 and _serves(x_TD, w13, w2, num_rows)


def serves_undecided_fp8(
    x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, num_experts: int, rule: RoutingRule
) -> bool:
    """As `kernels.experts_few.serves_undecided`, of weights in fp8."""
    return chooses(x_TD.shape[0], num_experts, rule) and _serves(x_TD, w13, w2, x_TD.shape[0] * rule.top_k, num_experts)


def _serves(x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, num_rows: int, num_experts: int = 0) -> bool:
    width, num_hidden = w2.values.shape[1:]
    return (
        0 < x_TD.shape[0] <= (FEW_TOKENS if 3 * width * num_hidden <= _MOST_BYTES else WARPS.value)
        and num_hidden <= _MOST_HIDDEN
        and device_generation(x_TD) == 9
        and 0 < min(num_rows, w2.values.shape[0]) <= MOST_SLOTS
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and w13.values.dtype == w2.values.dtype == FP8
        and w13.scales.is_contiguous()
        and w2.scales.is_contiguous()
        and num_stages(width, num_hidden, num_experts) >= _FEWEST_STAGES
        and tma_serves(x_TD, w13.values)
        and tma_serves(x_TD, w2.values)
    )


def experts_few_fp8(
    x_TD: Tensor,
    w13: QuantizedBlocks,
    w2: QuantizedBlocks,
    offsets_S1: Tensor,
    token_R: Tensor,
    num_rows: int,
    counters: Tensor,
) -> Tensor:
    """y_RD: what `Fp8Experts` makes of the rows x[token], where `serves_few_tokens_fp8`. A token comes at most once in
    a slot. `counters`, zeros, are used up: they serve one launch."""
    return _launch(x_TD, w13, w2, offsets_S1, token_R, num_rows, counters, None)


def experts_few_fp8_undecided(x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, undecided: Undecided) -> Tensor:
    """The same of rows whose experts are still to be chosen, where `serves_undecided_fp8`: fills what `undecided`
    leaves open. Row t * K + k of y is that of choice k of token t."""
    packed = undecided.packed
    assert packed.counters is not None, "what is undecided has counters"
    assert x_TD.shape[0] <= WARPS.value, f"{x_TD.shape[0]} rows: a row is chosen for in each of {WARPS.value} warps"
    num_rows = packed.packed_row_TK.numel()
    return _launch(x_TD, w13, w2, packed.offsets_S1, None, num_rows, packed.counters, undecided)


def _launch(
    x_TD: Tensor,
    w13: QuantizedBlocks,
    w2: QuantizedBlocks,
    offsets_S1: Tensor,
    token_R: Tensor | None,
    num_rows: int,
    counters: Tensor,
    undecided: Undecided | None,
) -> Tensor:
    (num_tokens, width), (num_slots, _, num_hidden) = x_TD.shape, w2.values.shape
    h_RF, y_RD = x_TD.new_empty(num_rows, num_hidden), x_TD.new_empty(num_rows, width)
    of_choice = choice_operands(undecided)
    experts_few_fp8_kernel[(num_multiprocessors(x_TD.device),)](
        x_TD,
        descriptor(w13.values.view(-1, width), 16, GROUP),
        w13.scales,
        descriptor(w2.values.view(-1, num_hidden), ROWS.value, GROUP),
        w2.scales,
        offsets_S1,
        token_R,
        *of_choice.tables,
        counters,
        h_RF,
        y_RD,
        num_tokens,
        num_slots,
        num_hidden,
        width,
        x_TD.stride(0) // 8,
        *of_choice.numbers,
        STAGES=num_stages(width, num_hidden, of_choice.num_experts),
        X_BATCHES=_batches(width),
        H_BATCHES=_batches(num_hidden),
        BLOCK_S=max(32, next_power_of_2(num_slots)),
        CHOICE=of_choice.kind,
        num_warps=4,
        maxnreg=96,  # room for programs of the launches before and after beside this one's
        **dependent_launch(x_TD),
    )
    return y_RD
