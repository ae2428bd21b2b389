"""Experts of few tokens in fp8 in one launch (kernels/experts_few_fp8.py) with less before a second product, and for
large experts at eight tokens. In the place of `experts_few_fp8_kernel`, and of the rule that leaves experts above 16 MB
at more than four tokens to four launches. The same bits.

What the readings fit (reckoned from them and from sm_90 code, not measured apart). Beside the bytes of the experts that
are hit, at 4.42 TB/s, a layer took 11.1, 11.1, 10.2 and 11.0 us with qwen3's 1, 2, 4 and 8 tokens: that is lost once,
not with every stage. dsv3 took 12.1, 9.7, 14.7 and 29.1: at 4 and 8 tokens 7 and 36 % of its slots have three rows or
more, which are quantised as eight: 1.4 and 8.7 second pieces of a program, some 2 us each. mixtral, which quantised
each part of a row of h between two sweeps, lost 1.3 and 1.9 us a part. So large experts lose what stands before a
second piece's first product: its note comes when its first stage is asked for, 2 us ahead of the weights (four stages
of 0.49); behind it lie, each after the one before, a counter (a reading of L2 and two barriers), and for every 4 or 8
groups of columns a reading of L2, sums and divisions (of dsv3's h 8 rows four times, 2 rows twice). The chain of
products is none of it: ptxas waits once a stage, not once a step.

- Three and four rows are quantised as four, eight groups at once: dsv3 two times for four; 3 % of its slots have more.
- The next groups are read while some are quantised.
- All first products are done soon after the last was taken. Who asks for weights looks for that, while they come, and
  its notes say so: no counter is asked from then on.
- The copy engine reads the description of w13 while the launch still waits.

Predicted, us a layer: dsv3 8 tokens 316 -> 297 to 304 (four launches 308), 4 tokens 232.7 -> 228 to 231, 1 token 91.8
-> 90.5 to 91.5; qwen3 8 tokens 66.1 -> 64.3 to 65.7, 4 tokens 41.3 -> 40.2 to 41, 1 token 19.6 -> 18.9 to 19.4,
choosing 4 tokens 47.8 -> 45 to 47. Where experts are small most of what is lost lies outside: packing before, the
launch's beginning, the sum behind.

Forms: what is in use, for experts of any size (dsv3's 8 tokens by four launches: 308); "mended". Not among the cases,
for the time they compile: the router's choice in the launch.

To land: the functions here and in the two files beside this one take the place of those of the same name in kernels/;
`fetched` is one more barrier; `_MOST_BYTES` goes if dsv3's 8 tokens take less than by four launches.
tests/test_kernels/test_experts_few_fp8.py as it is (its shapes have slots of 1 to 8 rows), dsv3 then with 8 tokens, and
large experts served in the last test. On the PTX machine: that `all_done` is believed shows from 48 second pieces on
(D = 1552, F = 48), that it is true where eight programs run at once (D = 272, F = 176).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from benchmarks.drafts._experts_few_fp8_feed import feed
from benchmarks.drafts._experts_few_fp8_multiply import multiply
from benchmarks.drafts.case import Case
from kernels import experts_few_fp8 as in_use
from kernels.barriers import barriers
from kernels.experts_few_choose import WARPS
from kernels.experts_few_feed import STAGE_BYTES
from kernels.experts_few_fp8_feed import BOX, GROUPS, LANES_THERE, SCALES
from kernels.experts_few_fp8_multiply import BATCH
from launch.bench_layer import LayerBank, LayerOperands, layer_shape
from launch.replay import Call
from tests.compare import filled_memory

ANY_BYTES = 1 << 62


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
    fetched = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(fetched, count=1)
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
            (feed, (weights, offsets_ptr, given, fetched, STAGES, PLACES, BLOCK_S, CHOICE, PDL)),
        ],
        [4, 4, 1],
        [96, 96, 64],
    )


@contextlib.contextmanager
def any_bytes() -> Iterator[None]:
    with mock.patch.object(in_use, "_MOST_BYTES", ANY_BYTES):
        yield


@contextlib.contextmanager
def mended() -> Iterator[None]:
    with mock.patch.multiple(in_use, experts_few_fp8_kernel=experts_few_fp8_kernel, _MOST_BYTES=ANY_BYTES):
        yield


def install() -> None:
    in_use.experts_few_fp8_kernel, in_use._MOST_BYTES = experts_few_fp8_kernel, ANY_BYTES


def cases(device: torch.device) -> Iterator[Case]:
    """Sums over experts and the experts' rows, bit by bit."""
    if device.type != "cuda":
        yield _case("tiny T=3", LayerBank(layer_shape("tiny-fp8"), device).operands(3))
        return
    for name in ("qwen3-fp8", "dsv3-ep8-fp8"):
        bank = LayerBank(layer_shape(name), device)
        for num_tokens in (8, 4, 1):
            yield _case(f"{name} T={num_tokens}", bank.operands(num_tokens))
        del bank
        torch.cuda.empty_cache()


def _case(name: str, rotation: list[LayerOperands]) -> Case:
    forms = {"in use": any_bytes, "mended": mended}
    return Case(name, {form: [_call(each, within) for each in rotation] for form, within in forms.items()})


def _call(operands: LayerOperands, within: Callable[[], AbstractContextManager[None]]) -> Call:
    """(sums of tokens, rows of experts). The first call finds NaN in what it gets from the allocator."""
    experts, dispatcher = operands.experts, operands.dispatcher
    fresh = [True]

    def call() -> tuple[Tensor, ...]:
        with within(), filled_memory() if fresh else contextlib.nullcontext():
            fresh.clear()
            inputs = dispatcher.dispatch(operands.x_TD, *operands.routing)
            y_RD = experts(inputs)
            return dispatcher.combine(y_RD, inputs.handle), y_RD

    return call
