"""Both products of the routed experts of 1 to 8 tokens with fp8 weights in one launch, rows quantised inside it, for
compute capability 9. In the place of quantising, the first product, quantising and the second product
(kernels/grouped_gemm_fp8.py, kernels/quantize.py): kernels/experts_few.py with other weights. us a layer in graphs,
today / predicted: qwen3 1 token 21.4 / 17.5, 2 tokens - / 23.4, 4 tokens - / 36.5, 8 tokens 71.9 / 60.5 (64.8 wanted);
dsv3-ep8 1 token 91.9 / 84.4, 8 tokens 310 / 287; mixtral 1 token 93 / 91, 8 tokens 322 / 283. From a simulation of its
programs, rings and counters at 4.55 TB/s (what 8 tokens in bf16 reach), plus 3.5 for packing and the sum. It was fitted
to experts_few.py in bf16 with one group of warps and with two (1 row 27.9 and 20.3, 4 rows 94.0 and 63.4, measured +6.9
and +30.4 for one), and gives for fp8 with two groups 19.0 and 67.5, where a trial has read 18.9 and 69.4.

What differs from bf16, and why:
- Three groups of warps. A piece is half the bytes, but as many instructions wait on each other in it: two groups take
  3.9 and 3.5 us for pieces that come every 1.9 and 1.5.
- Rows of h lie in memory rounded, not quantised; who needs a slot's rows quantises them for itself (250 instructions
  for two rows, of which a slot rarely has more). So pieces of a first product stay 16 columns wide. With pieces of 128
  columns, which could write scales, one token has 48 pieces for 132 programs.
- x is quantised by every program while its first weights come: no launch, and no wait for one.
- Scales of weights come with the stage they belong to, by copies of four bytes that the stage's barrier counts.
- Offsets and the first piece's number are asked for together: a wait less before the first weights, in bf16 too.
- A step of 128 columns is summed from zero, all steps of a stage at once, and added in order by its scales: the bits
  of the many-row products.
- h comes in parts of 2048 columns, so that mixtral's rows do. Pieces of its second product have 32 rows, not 64: else
  one token has 128 pieces of 900 KB.

The router may leave the choice of experts to this launch, as in bf16 (up to four tokens).

Landing: the two files beside this one become kernels/experts_few_fp8_feed.py and _multiply.py, this one's upper part
kernels/experts_few_fp8.py; `Fp8Experts` gets `_few` and `may_choose` as `Experts` has them, and the layer asks both
(`install` below). GROUPS and the order of taking and offsets are worth a try in bf16. Tests: test_experts_few.py and
test_experts_few_choose.py with quantised weights, rows of NaN and inf, and an AOT compile of both kinds. Shared experts
(bf16 beside fp8) do not come along. Not measured: everything.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from benchmarks.drafts._experts_few_fp8_feed import BOX, GROUPS, LANES_THERE, SCALES, feed
from benchmarks.drafts._experts_few_fp8_multiply import BATCH, multiply
from benchmarks.drafts.case import Case
from expert_parallel.dispatcher import ExpertInput
from kernels.checks import cdiv, next_power_of_2
from kernels.combine import UNROLLED
from kernels.dependent_launch import dependent_launch
from kernels.experts_few import FEW_TOKENS
from kernels.experts_few_choose import WARPS
from kernels.experts_few_feed import STAGE_BYTES
from kernels.gate_few import Undecided
from kernels.grouped_gemm_specialized import descriptor
from kernels.grouped_gemm_tma import tma_serves
from kernels.quantize import FP8, GROUP, QuantizedBlocks
from kernels.routing import RoutingRule
from kernels.row_tiles import slot_step
from kernels.tiles import device_generation, num_multiprocessors
from launch.bench_layer import LayerBank, LayerOperands, layer_shape
from moe.model.experts import Fp8Experts
from moe.model.layer import MoELayer
from router.gate import Gate
from tests.compare import filled_memory

_MOST_STAGES, _FEWEST_STAGES = 11, 6
"""Six are dsv3's."""

_MOST_SLOTS = 64
"""With rows at once: each has a counter."""

_MOST_EXPERTS = 256
"""That are chosen among: eight places a lane."""

_MOST_H_BATCHES = 2
"""Of a part of h: 2048 columns."""

_ROOM = 213 << 10
"""Bytes of a program for its stages, rows and choices: all but barriers, notes and exchanged sums."""


# y[r] = w2[s] q(h[r]), h[r] = silu(gate q(x)) * (up q(x)) with w13[s] of x[token[r]], s the slot whose rows hold r; q
# quantises a row by 128 columns as kernels/quantize.py does, h is cast to y's type before
#   x_ptr [T, D], T at most 8, rows strided by groups of 8 values; w13_desc e4m3 [S * 2F, D] in blocks of [16, 128],
#   w2_desc [S * D, F] in blocks of [ROWS, 128]; w13_scale_ptr fp32 [S, 2, ceil(F / 128), ceil(D / 128)], w2_scale_ptr
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
    ROWS: gl.constexpr,
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
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    noted = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    x_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=LANES_THERE)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(noted.index(i), count=1)
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
            (multiply, (given, STAGES, PLACES, ROWS, CHOICE, PDL, 0)),
            (multiply, (given, STAGES, PLACES, ROWS, CHOICE, PDL, 1)),
            (multiply, (given, STAGES, PLACES, ROWS, CHOICE, PDL, 2)),
            (feed, (weights, offsets_ptr, given, STAGES, PLACES, BLOCK_S, ROWS, CHOICE, PDL)),
        ],
        [4, 4, 1],
        [96, 96, 64],
    )


def num_stages(width: int, num_hidden: int, num_experts: int = 0) -> int:
    """Of 16 KiB: as many as fit beside the rows of x, those of h that each group has, and what is handed over of so
    many experts that are chosen in the launch.

    >>> num_stages(2048, 768), num_stages(7168, 2048), num_stages(4096, 14336), num_stages(2048, 768, 128)
    (10, 6, 8, 10)
    """
    rows = (_batches(width) + GROUPS.value * _h_batches(num_hidden)) * BATCH.value * 8 * (GROUP + 4)
    choice = 8 * WARPS.value * _block_e(num_experts) if num_experts else 0
    return min(_MOST_STAGES, (_ROOM - rows - choice) // STAGE_BYTES.value)


def _batches(columns: int) -> int:
    return cdiv(cdiv(columns, GROUP), BATCH.value)


def _h_batches(num_hidden: int) -> int:
    return min(_MOST_H_BATCHES, _batches(num_hidden))


def _block_e(num_experts: int) -> int:
    return max(32, next_power_of_2(num_experts))


def _second_rows(num_hidden: int) -> int:
    """Of a piece of the second product. Simulated, mixtral (14336), 64 / 32: 1 token 92.0 / 87.8, 2 tokens 159.0 /
    162.7, 8 tokens 279.7 / 279.2; qwen3 (768), 8 tokens 57.0 / 72.6: half of what the tensor core reads is in vain."""
    return 64 if num_hidden <= 4096 else 32


def serves_few_tokens_fp8(
    x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, offsets_S1: Tensor, num_rows: int
) -> bool:
    """As `kernels.experts_few.serves_few_tokens`, of weights in fp8."""
    return slot_step(offsets_S1) == 1 and _serves(x_TD, w13, w2, num_rows)


def serves_undecided_fp8(
    x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, num_experts: int, rule: RoutingRule
) -> bool:
    """As `kernels.experts_few.serves_undecided`, of weights in fp8."""
    return (
        x_TD.shape[0] <= WARPS.value
        and rule.num_groups == 1
        and rule.top_k <= UNROLLED.value
        and num_experts <= _MOST_EXPERTS
        and _serves(x_TD, w13, w2, x_TD.shape[0] * rule.top_k, num_experts)
    )


def _serves(x_TD: Tensor, w13: QuantizedBlocks, w2: QuantizedBlocks, num_rows: int, num_experts: int = 0) -> bool:
    return (
        0 < x_TD.shape[0] <= FEW_TOKENS
        and device_generation(x_TD) == 9
        and 0 < min(num_rows, w2.values.shape[0]) <= _MOST_SLOTS
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and w13.values.dtype == w2.values.dtype == FP8
        and w13.scales.is_contiguous()
        and w2.scales.is_contiguous()
        and num_stages(*w2.values.shape[1:], num_experts) >= _FEWEST_STAGES
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
    tables, num_experts, choice, numbers = (None,) * 7, 0, None, (0, 0.0, 0.0)
    if undecided is not None:
        rule, (num_parts, _, num_experts) = undecided.rule, undecided.parts_PTE.shape
        given = (undecided.parts_PTE, undecided.bias_E, undecided.real_T, undecided.slot_of_E)
        tables = (*given, *undecided.routing, undecided.packed.packed_row_TK)
        kind = (rule.score == "sigmoid", rule.renormalize, _block_e(num_experts))
        choice = (num_experts, num_parts, rule.top_k, *kind)
        numbers = (rule.top_k, float(rule.epsilon), float(rule.scale))
    rows = _second_rows(num_hidden)
    experts_few_fp8_kernel[(num_multiprocessors(x_TD.device),)](
        x_TD,
        descriptor(w13.values.view(-1, width), 16, GROUP),
        w13.scales,
        descriptor(w2.values.view(-1, num_hidden), rows, GROUP),
        w2.scales,
        offsets_S1,
        token_R,
        *tables,
        counters,
        h_RF,
        y_RD,
        num_tokens,
        num_slots,
        num_hidden,
        width,
        x_TD.stride(0) // 8,
        *numbers,
        STAGES=num_stages(width, num_hidden, num_experts),
        X_BATCHES=_batches(width),
        H_BATCHES=_h_batches(num_hidden),
        BLOCK_S=max(32, next_power_of_2(num_slots)),
        ROWS=rows,
        CHOICE=choice,
        num_warps=4,
        maxnreg=96,  # room for programs of the launches before and after beside this one's
        **dependent_launch(x_TD),
    )
    return y_RD


_today = Fp8Experts.__call__


def few_or_today(self: Fp8Experts, inputs: ExpertInput) -> Tensor:
    """`Fp8Experts` with few tokens in one launch."""
    x_TD = inputs.rows_XD
    if inputs.undecided is not None:
        return experts_few_fp8_undecided(x_TD, self.w13, self.w2, inputs.undecided)
    if inputs.counters is None or inputs.row_index_R is None or inputs.scales_GX is not None:
        return _today(self, inputs)
    few = (x_TD, self.w13, self.w2, inputs.offsets_S1)
    if inputs.out_dtype not in (None, x_TD.dtype) or not serves_few_tokens_fp8(*few, inputs.num_rows):
        return _today(self, inputs)
    return experts_few_fp8(*few, inputs.row_index_R, inputs.num_rows, inputs.counters)


def may_choose(self: Fp8Experts, x_TD: Tensor, num_experts: int, rule: RoutingRule) -> bool:
    """As `router.gate.MayChoose`."""
    return serves_undecided_fp8(x_TD, self.w13, self.w2, num_experts, rule)


def install() -> None:
    make = MoELayer.__init__

    def made(self: MoELayer, *args: object, **options: object) -> None:
        make(self, *args, **options)
        if isinstance(self.experts, Fp8Experts):
            self._may_choose = functools.partial(may_choose, self.experts)

    Fp8Experts.__call__ = few_or_today
    MoELayer.__init__ = made


SHAPES = ("qwen3-fp8", "dsv3-ep8-fp8", "E60-k4-D2896-F1424-fp8")  # of the last nothing divides by 128
LARGE = "mixtral-fp8"  # h in parts


def cases(device: torch.device) -> Iterator[Case]:
    """Sums over experts and the experts' rows, bit by bit; what is chosen, too, where the launch chooses."""
    if device.type != "cuda":
        bank = LayerBank(layer_shape("tiny-fp8"), device)
        for num_tokens in (1, 3):
            yield _case(f"tiny T={num_tokens}", bank.operands(num_tokens), None)
        gate = Gate(torch.randn(6, 64).bfloat16(), None, RoutingRule(top_k=2))
        yield _case("tiny choosing T=2", bank.operands(2), gate)
        return
    for name in (*SHAPES, LARGE):
        bank = LayerBank(layer_shape(name), device)
        for num_tokens in (1, 8) if name == LARGE else (1, 2, 4, 8):
            yield _case(f"{name} T={num_tokens}", bank.operands(num_tokens), None)
        if name == SHAPES[0]:
            weight_ED = torch.randn(bank.shape.num_experts, bank.shape.hidden, device=device).mul_(0.02).bfloat16()
            gate = Gate(weight_ED, None, RoutingRule(top_k=bank.shape.top_k))
            for num_tokens in (1, 2, 4):
                yield _case(f"{name} choosing T={num_tokens}", bank.operands(num_tokens), gate)
        del bank
        torch.cuda.empty_cache()


def _case(name: str, rotation: list[LayerOperands], gate: Gate | None) -> Case:
    forms = {"in use": _today, "one launch": few_or_today}
    return Case(name, {form: [_call(each, experts, gate) for each in rotation] for form, experts in forms.items()})


def _call(
    operands: LayerOperands, experts_call: Callable[[Fp8Experts, ExpertInput], Tensor], gate: Gate | None
) -> Callable[[], tuple[Tensor, ...]]:
    """(sums of tokens, rows of experts; with a gate sums, ids and weights, for then rows lie in another order). The
    first call finds NaN in what it gets from the allocator."""
    experts, dispatcher = operands.experts, operands.dispatcher
    assert isinstance(experts, Fp8Experts), "a shape in fp8"
    fresh = [True]

    def run() -> tuple[Tensor, ...]:
        if gate is None:
            inputs = dispatcher.dispatch(operands.x_TD, *operands.routing)
            y_RD = experts_call(experts, inputs)
            return dispatcher.combine(y_RD, inputs.handle), y_RD
        choose = functools.partial(may_choose, experts) if experts_call is few_or_today else None
        routing, packed = gate.and_pack(operands.x_TD, *dispatcher.own_slots, None, choose)
        inputs = dispatcher.dispatch(operands.x_TD, *routing, packed)
        y_RD = experts_call(experts, inputs)
        return dispatcher.combine(y_RD, inputs.handle), *routing

    def call() -> tuple[Tensor, ...]:
        with filled_memory() if fresh else contextlib.nullcontext():
            fresh.clear()
            return run()

    return call
