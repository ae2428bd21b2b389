"""The merge of few rows' splits with all of a run on their way at once (kernels/split_runs.py, `merge_runs`).
Predicted: qwen3 -0.2 to -0.5 us a layer at one row (-10 to -24 us a step).

Today's chain from the wait to the store, in sm_90 machine code: of eight parts, ptxas asks for what three need, then,
behind their sums, for the next two, then for the last three (62 registers): three rounds of L2, with five parts (576
keys) two. Here parts are carried into the loop over runs, as in value_rows.py: their loads stand ahead of it, all
before the first use (84 registers), and one round is left, of 0.3 us (an L2 hit alone) to 0.6. The whole kernel took
1.0 us from the end of the launch before to its own (docs/profile.md), so no more than one round is to be had.

The order of the merge and its operations are the same, so the same bits.

To land it: into `_merge_runs_kernel` where BLOCK_H is 1; ONE_RUN goes there. Test: test_attention_decode.py as it is.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.drafts.case import Case
from kernels import attention_decode as in_use
from kernels.checks import cdiv, next_power_of_2
from kernels.decode_cut import SPLITS, most_parts
from kernels.dependent_launch import AHEAD_ROWS, dependent_launch, wait_for_inputs
from kernels.split_kv import ALIGN, SplitRule
from kernels.split_runs import RUN, Parts, merge_next, no_keys, splits_of
from launch.replay import rotation_length

_merge_runs = in_use.merge_runs  # what it falls back to, also when installed

# out[b, h] = acc / total of all parts of [b, h], merged run by run, as kernels/split_runs.py does it
#   acc_ptr fp32 [B, P, H, V], sums_ptr fp32 [2, B, P, H], out_ptr [B, H, V], contiguous; kv_lens_ptr int32 [B]
#   grid (cdiv(V, BLOCK_V), H, B): a program owns BLOCK_V columns of a head of a sequence; a part is a split or, WHOLE,
#   a run. A sequence of one part or none is done already. Columns beyond the last are masked.


@triton.jit
def _run_from(
    acc_ptrs, largest_ptrs, total_ptrs, first, parts, inside, HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """(largest scores [1], sums [1], values [1, BLOCK_V]) of RUN parts, of which `first` is the first."""
    largests, totals, accs = (), (), ()
    for part in tl.static_range(RUN):
        here = first + part < parts
        largests += (tl.load(largest_ptrs + part * HEADS, mask=here, other=float("-inf")),)
        totals += (tl.load(total_ptrs + part * HEADS, mask=here, other=0.0),)
        accs += (tl.load(acc_ptrs + part * (HEADS * VALUE_WIDTH), mask=here & inside, other=0.0),)
    return largests, totals, accs


@triton.jit(do_not_specialize=["num_parts", "stride_sum"])
def _merge_rows_kernel(
    acc_ptr,
    sums_ptr,
    kv_lens_ptr,
    out_ptr,
    num_parts,
    stride_sum,
    unit,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, _, parts = splits_of(kv_len, SPLIT_LEN, FEW_SPLITS, WINDOW)  # pyright: ignore
    if WHOLE:
        parts = tl.cdiv(parts, RUN)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = v < VALUE_WIDTH
    row = sequence * num_parts * HEADS + head + tl.arange(0, 1)
    largest_ptrs, total_ptrs = sums_ptr + row, sums_ptr + stride_sum + row
    acc_ptrs = acc_ptr + row[:, None] * VALUE_WIDTH + v
    wait_for_inputs(PDL)  # lengths are older than the launch before
    largests, totals, accs = _run_from(acc_ptrs, largest_ptrs, total_ptrs, 0, parts, inside, HEADS, VALUE_WIDTH)
    whole_largest, whole_total, whole_acc = no_keys(1, BLOCK_V)  # pyright: ignore
    # Parts come from the turn before: what a loop carries is asked for outside of the sums, all of it at once.
    for first in range(0, tl.where(parts > 1, parts, 0), RUN):
        largest, total, acc = no_keys(1, BLOCK_V)  # pyright: ignore
        for part in tl.static_range(RUN):
            here = first + part < parts
            merged = merge_next(largest, total, acc, largests[part], totals[part], accs[part])  # pyright: ignore
            largest, total = tl.where(here, merged[0], largest), tl.where(here, merged[1], total)
            acc = tl.where(here, merged[2], acc)
        merged = merge_next(whole_largest, whole_total, whole_acc, largest, total, acc)  # pyright: ignore
        whole_largest = tl.where(first == 0, largest, merged[0])
        whole_total, whole_acc = tl.where(first == 0, total, merged[1]), tl.where(first == 0, acc, merged[2])
        largest_ptrs, total_ptrs = largest_ptrs + RUN * HEADS, total_ptrs + RUN * HEADS
        acc_ptrs += RUN * HEADS * VALUE_WIDTH
        largests, totals, accs = _run_from(
            acc_ptrs, largest_ptrs, total_ptrs, first + RUN, parts, inside, HEADS, VALUE_WIDTH
        )
    if parts > 1:
        out = whole_acc / unit / tl.where(whole_total == 0.0, 1.0, whole_total)[:, None]
        out_ptrs = out_ptr + (sequence * HEADS + head) * VALUE_WIDTH + v
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


def merge_runs(
    parts: Parts,
    kv_lens_B: Tensor,
    out_BHV: Tensor,
    rule: SplitRule,
    *,
    window: int = 0,
    unit: float = 1.0,
    whole: bool,
) -> None:
    """As in kernels/split_runs.py."""
    num_sequences, number, num_heads, width = parts.acc_BPHV.shape
    if num_sequences > AHEAD_ROWS:
        _merge_runs(parts, kv_lens_B, out_BHV, rule, window=window, unit=unit, whole=whole)
        return
    assert out_BHV.is_contiguous(), f"out_BHV has strides {out_BHV.stride()}; the merge writes it as one block"
    block_v = min(next_power_of_2(width), 128)
    _merge_rows_kernel[(cdiv(width, block_v), num_heads, num_sequences)](
        *parts,
        kv_lens_B,
        out_BHV,
        number,
        parts.sums_2BPH.stride(0),
        unit,
        HEADS=num_heads,
        VALUE_WIDTH=width,
        BLOCK_V=block_v,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        WINDOW=window,
        WHOLE=whole,
        num_warps=1,
        **dependent_launch(out_BHV, ahead=True),
    )


def _merged(run: Callable[..., None], parts: Parts, kv_lens_B: Tensor, out_BHV: Tensor, **options: Any) -> Tensor:
    run(parts, kv_lens_B, out_BHV, SPLITS, **options)
    return out_BHV


def _merge_reference(
    parts: Parts, kv_lens_B: Tensor, out_BHV: Tensor, rule: SplitRule, *, window: int = 0, whole: bool = False
) -> None:
    """All parts at once: other roundings, no other result."""
    for b, kv_len in enumerate(kv_lens_B.tolist()):
        number = _number_of_parts(rule, kv_len, window, whole=whole)
        if number > 1:
            largest_PH, total_PH = parts.sums_2BPH[:, b, :number]
            weight_PH = torch.exp2(largest_PH - largest_PH.amax(0))
            acc_HV = (weight_PH[..., None] * parts.acc_BPHV[b, :number]).sum(0)
            out_BHV[b] = (acc_HV / (weight_PH * total_PH).sum(0)[:, None]).to(out_BHV.dtype)


def _number_of_parts(rule: SplitRule, kv_len: int, window: int, *, whole: bool) -> int:
    """Of a sequence of up to 64 of the longest splits, as kernels/split_runs.py cuts it."""
    span = kv_len - (max(kv_len - window, 0) // ALIGN.value * ALIGN.value if window else 0)
    longer = next(times for times in (1, 2, 4) if times == 4 or span <= times * rule.few * rule.length)
    splits = cdiv(span, longer * rule.length)
    return cdiv(splits, RUN.value) if whole else splits


def cases(device: torch.device) -> Iterator[Case]:
    """qwen3's and mixtral's one row; several runs; an odd width, a window, runs as parts."""
    shapes = [
        ("qwen3 1 row, 576 keys", [576], 32, 128, 0, False),
        ("mixtral 1 row, 1000 keys", [1000], 32, 128, 0, False),
        ("1 row, 20000 keys", [20000], 32, 128, 0, False),
        ("5 rows of 0 to 9000 keys, width 96", [0, 100, 129, 2049, 9000], 3, 96, 0, False),
        ("2 rows, window 700", [650, 5000], 3, 128, 700, False),
        ("2 rows, runs as parts", [3000, 20000], 3, 128, 0, True),
    ]
    cuda = device.type == "cuda"
    interpreted = not isinstance(_merge_rows_kernel, triton.JITFunction)
    runs: dict[str, Callable[..., None]] = {"in use": _merge_runs if cuda else _merge_reference}
    runs["at once"] = merge_runs if cuda or interpreted else _merge_reference
    for name, lens, *rest in shapes if cuda else shapes[3:]:
        rotation = rotation_length(4 * len(lens) * 8 * rest[0] * rest[1]) if cuda else 1
        forms = {
            form: [_call(run, lens, *rest, device, seed) for seed in range(rotation)] for form, run in runs.items()
        }
        yield Case(name, forms, tolerance=0.0 if cuda else 1e-5)


def _call(
    run: Callable[..., None], lens: list[int], num_heads: int, width: int, window: int, whole: bool,
    device: torch.device, seed: int,
) -> Callable[[], Tensor]:  # fmt: skip
    """Parts behind a sequence's last one are NaN, as is the only one; `out` holds sevens, which stay where there is
    nothing to merge."""
    generator = torch.Generator().manual_seed(seed)
    number = most_parts(max(lens), window, SPLITS, whole=whole)
    parts = Parts.of(len(lens), number, num_heads, width, torch.device("cpu"))
    parts.acc_BPHV.copy_(torch.randn(parts.acc_BPHV.shape, generator=generator))
    parts.sums_2BPH.copy_(1 + torch.rand(parts.sums_2BPH.shape, generator=generator))
    for b, kv_len in enumerate(lens):
        written = _number_of_parts(SPLITS, kv_len, window, whole=whole)
        written = written if written > 1 else 0
        parts.acc_BPHV[b, written:], parts.sums_2BPH[:, b, written:] = torch.nan, torch.nan
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    out_BHV = torch.full((len(lens), num_heads, width), 7.0, dtype=dtype, device=device)
    lens_B = torch.tensor(lens, dtype=torch.int32, device=device)
    on_device = Parts(*(each.to(device) for each in parts))
    return partial(_merged, run, on_device, lens_B, out_BHV, window=window, whole=whole)


def install() -> None:
    in_use.merge_runs = merge_runs
