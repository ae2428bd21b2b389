"""The merge of MLA decode's splits with all parts of a chunk on their way at once (kernels/mla_merge.py). Predicted,
us with the splits: 16 heads 64 x 4096 85.1 -> 82.5 to 83.5, 1 x 4096 16.4 -> 14.5 to 15.5; 128 heads 64 x 4096 153 ->
150.5, 128 x 4096 306 -> 301, 256 x 1024 198 -> 188; what has no splits to merge is level.

The kernel in use means to ask for eight splits at once, but in sm_90 machine code (Triton 3.6 and 3.7.1, ptxas) it
asks for one after the other: 40 registers, and each split's logarithm and part stand behind the sums of the one
before it, so with `whole` nine rounds of L2 where two would do. Here splits are carried into the loop that merges
them, and their loads stand together ahead of it (24 in a row; 128 registers with eight parts of 16 bytes a thread, 80
with four). A round is 0.3 to 0.5 us: seven of them less. Where heads are many the merge is bound by what is on its
way: 12 programs a multiprocessor with 2 KB each, 24 KB, today (33.5 MB in 13.6 us, 67 MB in 35), six with 8 KB, 49
KB, here; 4.4 TB/s want some 33 KB. Sums in the same order, by the same `merge_step`: the same bits.

To land it: `_chunk` and the carried loop in kernels/mla_merge.py; `run_length`, FOLD and num_runs only with
mla_few_aligned.py. Test: test_merge of tests/test_kernels/test_mla_decode_hopper.py with a length beyond one chunk
(5000). kernels/split_runs.py's merge of four heads a program (40 registers, six rounds) and _values_kernel of more
than eight rows ask one after another likewise, and might take the same form.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.drafts._mla_piece_list_operands import rotation, spread
from benchmarks.drafts.case import Case
from kernels import mla_decode_hopper
from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.mla_decode import check_operands, mla_decode
from kernels.mla_merge import Splits, merge_parts, merge_step
from kernels.split_kv import SplitRule, split_bounds
from launch.replay import Call

# Written for Triton, and compiled by Gluon too: attention deals out the runs, and the merge asks what they are.


@triton.jit
def run_length(total, most, num_sequences, num_runs, split_len, splits):
    """(places of a run; splits of a run where each sequence has runs of its own, else 0; runs of a sequence then)

    total: of all sequences' places; most: of the longest, which has so many splits of that length. Sequences of one
    length are dealt out whole, so that nothing is left to merge, or else in runs of their own, so that no program ends
    with another sequence than it began with: where runs are a sixteenth longer at most."""
    length = tl.cdiv(total, num_runs)
    whole = tl.cdiv(length, most) * most
    equal = total == most * num_sequences
    merges = equal & (16 * whole <= 17 * length)
    runs = tl.maximum(num_runs // num_sequences, 1)
    own = tl.cdiv(tl.maximum(splits, 1), runs)
    fits = equal & (merges == 0) & (runs > 1) & (16 * own * (split_len // 64) <= 17 * length)
    return tl.where(merges, whole, length), tl.where(fits, own, 0), runs


# acc = part_s * 2^(lse_s - max_s) + acc * 2^(max_{s-1} - max_s), max_s = max(lse_0 .. lse_s), total likewise of ones;
#   out = acc / total, s ascending
#   parts_ptr [B, S, H, V] in any dtype, lse_ptr fp32 [B, S, H], out_ptr [B, H, V], contiguous; int32 [B]: kv_lens_ptr,
#   whole_ptr (or None; 1: nothing to merge, out is written); FOLD: in its place, what a sequence's lengths say, whose
#   tiles `num_runs` programs have had
#   grid (cdiv(V, BLOCK_V), cdiv(H, BLOCK_H), B): a program owns BLOCK_V columns of BLOCK_H heads of one sequence. A
#   sequence of one split or none is done already. fp32; heads from H on and columns from V on are masked.


@triton.jit
def _is_whole(
    kv_lens_ptr, sequence, kv_len, splits, num_sequences, num_splits, num_runs, SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
):  # fmt: skip
    """Whether all splits of a sequence begin in one run: as `find_run` and `splits_of_run` have it."""
    b = tl.arange(0, 256)
    total = tl.zeros((), tl.int32)
    most = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for base in range(0, num_sequences, 256):
        there = base + b < num_sequences
        tiles = tl.cdiv(tl.load(kv_lens_ptr + base + b, mask=there, other=0), 64)
        places = tl.where(there, tl.maximum(tiles, 1) + 1, 0)
        total += tl.sum(places, axis=0)
        most = tl.maximum(most, tl.max(places, axis=0))
        before += tl.sum(tl.where(base + b < sequence, places, 0), axis=0)
    split_len, _, longest_splits = split_bounds((most - 1) * 64, 1, SPLIT_LEN, FEW_SPLITS, 0)
    length, own, _ = run_length(total, most, num_sequences, num_runs, split_len, longest_splits)
    split_len, _, _ = split_bounds(kv_len, 1, SPLIT_LEN, FEW_SPLITS, 0)
    end = ((before + 1) // length + 1) * length - 1
    in_one = (own == 0) & (before + (splits - 1) * (split_len // 64) < end)
    return in_one & (num_sequences * num_splits > num_runs)


@triton.jit
def _chunk(
    parts_ptr, lse_ptr, row, first, splits, num_heads, real, inside, v, VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(logarithms [BLOCK_H], parts [BLOCK_H, BLOCK_V]) of CHUNK splits; row [BLOCK_H]: of the first one. One behind the
    last split changes no bit of the merge: its weight is 0, and adding its product, -0, leaves even the sign of a
    zero."""
    lses, parts = (), ()
    for i in tl.static_range(CHUNK):
        there, at = first + i < splits, row + i * num_heads
        lses += (tl.load(lse_ptr + at, mask=real & there, other=float("-inf")),)
        parts += (tl.load(parts_ptr + at[:, None] * VALUE_WIDTH + v[None, :], mask=inside & there, other=-0.0),)
    return lses, parts


@triton.jit(do_not_specialize=["num_splits", "num_sequences", "num_runs"])
def _merge_kernel(
    parts_ptr,
    lse_ptr,
    kv_lens_ptr,
    whole_ptr,
    out_ptr,
    num_splits,
    num_heads,
    num_sequences,
    num_runs,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    FOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, splits = split_bounds(kv_len, 0, SPLIT_LEN, FEW_SPLITS, 0)
    done = splits <= 1
    if FOLD:
        done |= _is_whole(
            kv_lens_ptr, sequence, kv_len, splits, num_sequences, num_splits, num_runs, SPLIT_LEN, FEW_SPLITS
        )
    head, v = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real, inside = head < num_heads, (head < num_heads)[:, None] & (v < VALUE_WIDTH)[None, :]
    row = sequence * num_splits * num_heads + head
    wait_for_inputs(PDL)  # lengths are older than the launch before
    if whole_ptr is not None:
        done |= tl.load(whole_ptr + sequence) != 0
    if done:
        return
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    # Splits come from the turn before: what a loop carries is asked for outside of the sums, all of it at once.
    lses, parts = _chunk(parts_ptr, lse_ptr, row, 0, splits, num_heads, real, inside, v, VALUE_WIDTH, CHUNK)
    for first in range(0, splits, CHUNK):
        for i in tl.static_range(CHUNK):
            maximum, total, acc = merge_step(maximum, total, acc, lses[i], parts[i])
        row += CHUNK * num_heads
        lses, parts = _chunk(
            parts_ptr, lse_ptr, row, first + CHUNK, splits, num_heads, real, inside, v, VALUE_WIDTH, CHUNK
        )
    out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * VALUE_WIDTH + v[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def merge_at_once(splits: Splits, kv_lens_B: Tensor, *, num_runs: int | None = None) -> None:
    """`merge_parts`. `num_runs`: of how many programs whose runs `run_length` tells; then `whole_B` is not read."""
    num_sequences, most, num_heads, width = splits.parts_BSHL.shape
    block_h, block_v, num_warps, chunk = 1, min(next_power_of_2(width), 128), 1, 8
    if num_sequences * num_heads * width >= 2**19:
        block_h, num_warps, chunk = min(8, next_power_of_2(num_heads)), 4, 8 if num_heads <= 32 else 4
    _merge_kernel[(cdiv(width, block_v), cdiv(num_heads, block_h), num_sequences)](
        splits.parts_BSHL,
        splits.lse_BSH,
        kv_lens_B,
        None if num_runs is not None else splits.whole_B,
        splits.out_BHL,
        most,
        num_heads,
        num_sequences,
        num_runs or 0,
        VALUE_WIDTH=width,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        CHUNK=chunk,
        SPLIT_LEN=splits.rule.length,
        FEW_SPLITS=splits.rule.few,
        FOLD=num_runs is not None and num_heads <= 16,
        num_warps=num_warps,
        **dependent_launch(splits.out_BHL, ahead=True),
    )


def install() -> None:
    """Wherever MLA decode's kernels for Hopper leave splits to a merge of its own launch."""
    mla_decode_hopper.merge_parts = merge_at_once


def cases(device: torch.device) -> Iterator[Case]:
    """With the splits before it, as it follows them in a layer; alone on a CPU, where the interpreter runs it."""
    if device.type != "cuda":
        yield _case_alone([0, 1000, 128, 600, 129, 5000], [0, 0, 0, 1, 0, 0], device)
        return
    shapes = [(16, 64, 4096), (16, 1, 4096), (128, 1, 4096), (128, 64, 4096), (128, 128, 4096), (128, 256, 1024)]
    for num_heads, number, length in shapes:
        yield _case(f"{num_heads} heads: {number}x{length}", [length] * number, num_heads, 64, length, device)
    yield _case("16 heads: 64 of 512..7500", spread(64, 512, 7500), 16, 64, 8192, device)
    yield _case("123 heads, pages of 16, up to 70000", [0, 1, 512, 513, 2049, 70000], 123, 16, 131072, device)


def _case(name: str, lens: Sequence[int], num_heads: int, page: int, bound: int, device: torch.device) -> Case:
    bounds: dict[str, Any] = {"scale": 0.07, "max_kv_len": bound}
    operands = rotation(lens, num_heads, page, bound, device)
    forms: dict[str, list[Call]] = {"in use": [partial(mla_decode, *each, **bounds) for each in operands]}
    forms["at once"] = [partial(_decode, *each, **bounds) for each in operands]
    return Case(name, forms)


def _decode(*operands: Tensor, **bounds: Any) -> Tensor:
    check_operands(*operands, None)
    splits = mla_decode_hopper.attend_splits(*operands, **bounds)
    if splits.parts_BSHL.shape[1] > 1:
        merge_at_once(splits, operands[4])
    return splits.out_BHL


def _case_alone(lens: list[int], whole: list[int], device: torch.device) -> Case:
    """Parts behind a sequence's last split are NaN, and so is what is to be written."""
    generator, rule = torch.Generator().manual_seed(0), SplitRule(128, few=8)
    parts_BSHL = torch.randn(len(lens), rule.most(max(lens)), 3, 40, generator=generator)
    lse_BSH = torch.randn(parts_BSHL.shape[:3], generator=generator) * 5
    out_BHL, lens_B = torch.full((len(lens), 3, 40), torch.nan), torch.tensor(lens, dtype=torch.int32)
    for b, number in enumerate(_numbers(rule, lens)):
        parts_BSHL[b, number:], lse_BSH[b, number:] = torch.nan, torch.nan
        if number <= 1 or whole[b]:
            out_BHL[b] = 7.0
    whole_B = torch.tensor(whole, dtype=torch.int32)

    def call(merge: Any) -> Tensor:
        splits = Splits(parts_BSHL, lse_BSH, whole_B, out_BHL.clone(), rule)
        merge(splits, lens_B)
        return splits.out_BHL

    forms = {"in use": merge_parts, "at once": merge_at_once}
    if isinstance(_merge_kernel, triton.JITFunction):  # a CPU without the interpreter
        forms = dict.fromkeys(forms, _merge_reference)
    return Case("alone", {form: [partial(call, merge)] for form, merge in forms.items()})


def _numbers(rule: SplitRule, lens: Sequence[int]) -> list[int]:
    """Splits of each length, none of which has more than 64 of the longest."""
    times = [next(n for n in (1, 2, 4) if n == 4 or kv_len <= n * rule.few * rule.length) for kv_len in lens]
    return [cdiv(kv_len, each * rule.length) for kv_len, each in zip(lens, times, strict=True)]


def _merge_reference(splits: Splits, kv_lens_B: Tensor) -> None:
    """In fp64."""
    for b, number in enumerate(_numbers(splits.rule, kv_lens_B.tolist())):
        if number > 1 and (splits.whole_B is None or not splits.whole_B[b]):
            lse_SH = splits.lse_BSH[b, :number].double()
            weight_SH = torch.exp2(lse_SH - lse_SH.amax(0))
            merged_HL = (weight_SH[..., None] * splits.parts_BSHL[b, :number]).sum(0) / weight_SH.sum(0)[:, None]
            splits.out_BHL[b] = merged_HL.to(splits.out_BHL.dtype)
