"""MLA decode with few heads and sequences of one length: each sequence has runs of its own (find_run of mla_runs.py),
and the merge knows from the lengths whether it has work. Predicted, us: 16 heads 64 x 4096 85.1 -> 83 to 84; with
mla_few_merge.py's merge 80.5 to 81.5 (80.4 wanted), the same for 32 x 4096 and 64 x 2048 by share; all else level.

Where 64 x 4096 goes, 68.3 us by bytes: 128 x 4096, whose 128 programs have a whole sequence each, takes 142 where
136.7 would be bytes, so a launch begins and ends in some 5 us, its idle merge included; the merge costs another 4.7
(84.5 against 79.8 without); parts written and read are 8.4 MB each, 1.9 us. The rest, some 4 us, lies in how tiles
are dealt out: a run is 32 places and a sequence 65, so runs shift against sequences, and 42 of 130 programs have the
same 4 splits of 8 tiles but end with another sequence than they began with: other queries, other lengths and pages
looked up by the copying warp with nothing on its way meanwhile, some 2 us at the end of all. In runs of its own a
sequence is exactly two programs', 4 splits each. Lengths that differ, or that do not fit so (48 x 4096), are dealt
out as today, a sixteenth being the limit.

By the lengths the merge finds out ahead of its wait what a run had whole, and spares a round of L2 (0.5 us) behind
it. Bits do not depend on who computes a split. Checked in Python against the runs in use: of 409 batches each split
in exactly one run, and `whole` as the merge has it (60 of them by Triton's interpreter). Registers and spills as in
use.

To land it: `run_length` into kernels/mla_runs.py, `find_run` in place of the one there, the merge's FOLD and num_runs
into kernels/mla_merge.py, and `whole_B` stays for kernels/mla_values.py. Test:
tests/test_kernels/test_mla_decode_hopper.py's "sequences of one length" with 64 x 4096 (nothing whole, all bits as
alone) and 32 x 4090 under a bound of 8192; the merge with `num_runs` against `whole_B` of the same launch.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import e, log2
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.drafts._mla_piece_list_operands import rotation, spread
from benchmarks.drafts.case import Case
from benchmarks.drafts.mla_few_merge import merge_at_once, run_length
from kernels import mla_decode_hopper, mla_values
from kernels.checks import next_power_of_2
from kernels.dependent_launch import dependent_launch
from kernels.mla_decode import check_operands, mla_decode
from kernels.mla_few_heads import _attend_few
from kernels.mla_merge import Splits
from kernels.mla_pieces import OF_THE_BATCH, bounds
from kernels.mla_runs import _add, copy_latents, places_of
from kernels.split_kv import split_workspace
from launch.replay import Call

_FEW_HEADS = 32

_attend_in_use, _merge_in_use = mla_decode_hopper.attend_splits, mla_decode_hopper.merge_parts


_run_length = gluon.jit(run_length.fn)


@gluon.jit
def find_run(
    kv_lens_ptr, num_sequences, num_splits, run, num_runs, SPLIT_LEN: gl.constexpr, FEW_SPLITS: gl.constexpr
):  # fmt: skip
    """(first place of a run, its end, first sequence, end of the sequences, places before that one). By four warps.

    Where there are runs enough for all splits, a run is one split, and lengths of others are not looked at."""
    if num_sequences * num_splits <= num_runs:
        sequence = run % num_sequences
        split_len, _, _ = bounds(gl.load(kv_lens_ptr + sequence), 1, SPLIT_LEN, FEW_SPLITS, 0)
        begin = run // num_sequences * (split_len // 64)
        end = begin + split_len // 64
        last = sequence + 1
        before = 0
    else:
        SEQUENCE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
        b = gl.arange(0, 256, SEQUENCE)
        total = 0
        most = 0
        for base in range(0, num_sequences, 256):
            there = base + b < num_sequences
            kv_len = gl.load(kv_lens_ptr + base + b, mask=there, other=0)
            places = gl.where(there, places_of(kv_len), 0)
            total += gl.sum(places, axis=0)
            most = gl.maximum(most, gl.max(places, axis=0))
        split_len, _, splits = bounds((most - 1) * 64, 1, SPLIT_LEN, FEW_SPLITS, 0)
        length, own, runs = _run_length(total, most, num_sequences, num_runs, split_len, splits)
        if own > 0:
            sequence = run // runs
            before = sequence * most
            begin = before + run % runs * own * (split_len // 64)
            end = begin + own * (split_len // 64)
            last = gl.minimum(sequence + 1, num_sequences)
        else:
            # In the place before a sequence no split begins: a run that has none before its first sequence ends with no
            # half of a split more than its length.
            begin = run * length - 1
            end = begin + length
            sequence = 0
            last = num_sequences
            before = 0
            seen = 0
            for base in range(0, num_sequences, 256):
                there = base + b < num_sequences
                kv_len = gl.load(kv_lens_ptr + base + b, mask=there, other=0)
                places = gl.where(there, places_of(kv_len), 0)
                after = seen + gl.associative_scan(places, 0, _add)
                passed = there & (after <= begin)
                sequence += gl.sum(passed.to(gl.int32), axis=0)
                before = gl.maximum(before, gl.max(gl.where(passed, after, 0), axis=0))
                seen += gl.sum(places, axis=0)
    return begin, end, sequence, last, before


# As few_heads_kernel of mla_few_heads.py, but for how runs are found.


@gluon.jit(do_not_specialize=OF_THE_BATCH[1:])
def aligned_heads_kernel(
    q_latent_ptr,
    q_pe_ptr,
    desc,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    scale_log2,
    num_sequences,
    num_splits,
    num_heads,
    stride_lb,
    stride_lh,
    stride_rb,
    stride_rh,
    stride_tb,
    whole_ptr,
    PAGE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    STAGES: gl.constexpr = 2  # a third was not faster: two keep the memory busy
    FOLD: gl.constexpr = BLOCK_H == 16  # registers hold a split's sum and the merged one of no more heads
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [9, BLOCK_H, 64], K)
    left = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    right = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], K)
    pe = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], K)
    left_chunks = left._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    right_chunks = right._reinterpret(dtype, [STAGES * 4, 64, 64], K)
    weights = gl.allocate_shared_memory(dtype, [64, BLOCK_H], gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full_left = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    full_right = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty_left = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty_right = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty_pe = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full_left.index(i), count=1)
        mbarrier.init(full_right.index(i), count=1)
        mbarrier.init(empty_left.index(i), count=1)
        mbarrier.init(empty_right.index(i), count=1)
        mbarrier.init(empty_pe.index(i), count=1)
    fence_async_shared()
    begin, stop, sequence, last_sequence, before = find_run(
        kv_lens_ptr, num_sequences, num_splits, gl.program_id(0), gl.num_programs(0), SPLIT_LEN, FEW_SPLITS
    )
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_few, (
                q_latent_ptr, q_pe_ptr, kv_lens_ptr, out_ptr, parts_ptr, lse_ptr, whole_ptr, scale_log2, num_splits,
                num_heads, stride_lb, stride_lh, stride_rb, stride_rh, begin, stop, sequence, last_sequence, before,
                queries, left, right, left_chunks, right_chunks, pe, weights, full_left, full_right, empty_left,
                empty_right, empty_pe, SPLIT_LEN, FEW_SPLITS, FOLD, PDL,
            )),
            (copy_latents, (
                desc, tables_ptr, kv_lens_ptr, stride_tb, begin, stop, sequence, last_sequence, before, left_chunks,
                right_chunks, pe, full_left, full_right, empty_left, empty_right, empty_pe, PAGE, SPLIT_LEN, FEW_SPLITS,
                PDL,
            )),
        ],
        [1],
        [40],
    )
    # fmt: on


def _num_runs(num_sequences: int, splits: int, device: torch.device) -> int:
    return min(num_sequences * splits, torch.cuda.get_device_properties(device).multi_processor_count)


def attend_aligned(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
) -> Splits:
    """`attend_splits`: with few heads in runs that `_run_length` tells."""
    num_sequences, num_heads, latent = q_latent_BHL.shape
    if num_heads > _FEW_HEADS:
        operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
        return _attend_in_use(*operands, scale=scale, max_kv_len=max_kv_len)
    device, page_size, rule = q_latent_BHL.device, cache_NPX.shape[1], mla_decode_hopper.split_rule(num_heads)
    splits = rule.most(max_kv_len)
    parts_BSHL, lse_BSH = split_workspace(num_sequences, splits, num_heads, latent, torch.float16, device)
    whole_B = torch.empty(num_sequences, dtype=torch.int32, device=device)
    out_BHL = q_latent_BHL.new_empty(num_sequences, num_heads, latent)
    desc = TensorDescriptor.from_tensor(
        cache_NPX.flatten(0, 1), [min(page_size, 64), 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    aligned_heads_kernel[(_num_runs(num_sequences, splits, device),)](
        q_latent_BHL,
        q_pe_BHR,
        desc,
        block_tables_BM,
        kv_lens_B,
        out_BHL,
        parts_BSHL,
        lse_BSH,
        scale * log2(e),
        num_sequences,
        splits,
        num_heads,
        *q_latent_BHL.stride()[:2],
        *q_pe_BHR.stride()[:2],
        block_tables_BM.stride(0),
        whole_B,
        PAGE=page_size,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        BLOCK_H=max(16, next_power_of_2(num_heads)),
        num_warps=4,
        **dependent_launch(q_latent_BHL),
    )
    return Splits(parts_BSHL, lse_BSH, whole_B, out_BHL, rule)


def merge_aligned(splits: Splits, kv_lens_B: Tensor) -> None:
    """`merge_parts`, with all parts of a chunk on their way at once; of few heads what is whole is known from the
    lengths, which `attend_aligned` has dealt out."""
    num_sequences, most = splits.parts_BSHL.shape[:2]
    few = splits.whole_B is not None
    num_runs = _num_runs(num_sequences, most, splits.out_BHL.device) if few else None
    merge_at_once(splits, kv_lens_B, num_runs=num_runs)


def _decode_aligned(*operands: Tensor, merge: Any, **bounds: Any) -> Tensor:
    """`mla_decode`, with this merge or the one in use."""
    check_operands(*operands, None)
    splits = attend_aligned(*operands, **bounds)
    if splits.parts_BSHL.shape[1] > 1:
        merge(splits, operands[4])
    return splits.out_BHL


def install() -> None:
    """Wherever MLA decode's kernels for Hopper serve."""
    mla_decode_hopper.attend_splits = mla_values.attend_splits = attend_aligned
    mla_decode_hopper.merge_parts = merge_aligned


def cases(device: torch.device) -> Iterator[Case]:
    """16 heads of one length, which are in runs of their own (the first three) or not, and of others; an odd shape."""
    if device.type != "cuda":
        yield _case("3 heads", [70, 70, 0, 200], 3, 16, 512, device, width=(16, 8))
        return
    for number, length in ((64, 4096), (32, 4096), (64, 2048), (128, 4096), (256, 1024), (64, 576), (1, 4096)):
        yield _case(f"{number}x{length}", [length] * number, 16, 64, length, device)
    yield _case("64 of 512..7500", spread(64, 512, 7500), 16, 64, 8192, device)
    yield _case("13 heads, pages of 16, 32x4090", [4090] * 32, 13, 16, 8192, device)
    yield _case("27 heads, 64x2048", [2048] * 64, 27, 64, 2048, device)


def _case(
    name: str,
    lens: Sequence[int],
    num_heads: int,
    page: int,
    bound: int,
    device: torch.device,
    width: tuple[int, int] = (512, 64),
) -> Case:
    bounds: dict[str, Any] = {"scale": 0.07, "max_kv_len": bound}
    operands = rotation(lens, num_heads, page, bound, device, width)
    forms: dict[str, list[Call]] = {"in use": [partial(mla_decode, *each, **bounds) for each in operands]}
    if device.type != "cuda":
        return Case(name, forms | {"aligned": forms["in use"]})
    for form, merge in (("aligned", _merge_in_use), ("aligned, merge at once", merge_aligned)):
        aligned = partial(_decode_aligned, merge=merge, **bounds)
        forms[form] = [partial(aligned, *each) for each in operands]
    return Case(name, forms)
