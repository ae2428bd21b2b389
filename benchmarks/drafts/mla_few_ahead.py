"""MLA decode with few heads (kernels/mla_few_heads.py) with less between its wait and its stores; the same bits.
Predicted, us: 16 heads 1 x 576 7.5 -> 5.3 to 6.5, so 27 to 59 us a step of dsv2-lite's row; 4 x 700 likewise; 1 x 4096
16.4 -> 14 to 15.5 with the merge; 64 x 4096 84.9 -> 83 to 84.5, 128 x 4096 and 256 x 1024 -0.5 to -1, bound by bytes.

By machine code (ptxas of Triton 3.6), for a program of two tiles, in use / here:
- instructions from the wait to the first copy of queries 360, with a load and two divisions / 40 (23 in the
  loop's form); barriers of all warps within the copies 8 / 0: where wgmma wants each 16 bytes is reckoned here, so that
  all latents are one copy.
- scores: a sum of 36 steps, each waits for the one before (33 cycles, as in linears of one row), twice: 2380 cycles /
  both tiles' sums in turn, 20 instructions for two steps: some 1440.
- softmax: 9 barriers a tile, in two reductions of two rounds each / 2, one of which is that of the weights, too. The
  warps' sums are added as the compiler's reduction adds them: (0 + 2) + (1 + 3). The second tile's is beside the first
  product.
- product with values: sums of 64 columns one after another, four steps that wait for each other, 8 times: 1056 / the
  sums of a half in turn: some 600. This, the softmax and rows to be zeroed (16 barriers / 4) help long runs too.
- result: 8 barriers in 4 KB / 1: turned within a warp, in 2 KB. Each warp writes sectors of 32 bytes, not whole lines.
- a tile with a sequence's newest key: asked for behind the wait, 0.9 us of memory / ahead of it, if it is among a
  program's first two, and the eight rows around that key once again behind it.
- the loop over tiles spills nothing; ahead of the wait a run's bounds are (56 bytes), and 10 registers for each split
  of 32 heads. Shared memory 170,588 bytes / 172,116; of 32 heads 191,580 / 192,596.

Unknown until a reading: whether the tensor core takes another sum's step while one waits (if not, scores win nothing,
and 64 columns in turn, the second form, are as good); each step is here a group of its own (`gsb0` at every HGMMA, but
no wait between them). If sums do not wait at all today either, the smaller gains hold.

Not done: scores of the next tile beside this one's softmax in runs of more tiles. With two stages that waits for a tile
that has not come while it holds the stage of one that could be copied: it wants a look at a barrier without waiting.

To land it: the kernel's file takes the place of kernels/mla_few_heads.py, without STEP; `_copy_latents` that of
`copy_latents` in kernels/mla_runs.py; the second descriptor goes into kernels/mla_decode_hopper.py; `zero_rows` of
kernels/mla_pieces.py stays for many heads. Tests: those of tests/test_kernels/test_mla_decode_hopper.py with
newest_desc (box 8 x 64) in the compile test, and one sequence of 65, 127, 128, 129, 577 and 640 keys against the same
row among 64 others; test_latent_attention of test_on_ptx.py, with 16 multiprocessors also, where runs are one split.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import e, log2
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.drafts._mla_few_ahead_kernel import few_ahead_kernel
from benchmarks.drafts.case import Case
from kernels import mla_decode_hopper, mla_values
from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch
from kernels.mla_decode import mla_decode
from kernels.mla_merge import Splits
from kernels.split_kv import split_workspace
from launch.replay import Call, rotation_length

_FEW_HEADS = 32

_in_use = mla_decode_hopper.attend_splits


def attend_splits(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    step: int = 16,
    **others: Any,
) -> Splits:
    """As the one in use, with few heads by the draft's kernel."""
    num_sequences, num_heads, latent = q_latent_BHL.shape
    if num_heads > _FEW_HEADS:
        operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
        return _in_use(*operands, scale=scale, max_kv_len=max_kv_len, **others)
    rule, device, page_size = mla_decode_hopper.split_rule(num_heads), q_latent_BHL.device, cache_NPX.shape[1]
    splits = rule.most(max_kv_len)
    parts_BSHL, lse_BSH = split_workspace(num_sequences, splits, num_heads, latent, torch.float16, device)
    out_BHL = q_latent_BHL.new_empty(num_sequences, num_heads, latent)
    whole_B = torch.empty(num_sequences, dtype=torch.int32, device=device)
    rows_X, layout = cache_NPX.flatten(0, 1), gl.NVMMASharedLayout(128, 16, 2)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    few_ahead_kernel[(min(num_sequences * splits, programs),)](
        q_latent_BHL,
        q_pe_BHR,
        TensorDescriptor.from_tensor(rows_X, [min(page_size, 64), 64], layout),
        TensorDescriptor.from_tensor(rows_X, [8, 64], layout),
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
        STEP=step,
        num_warps=4,
        **dependent_launch(q_latent_BHL),
    )
    return Splits(parts_BSHL, lse_BSH, whole_B, out_BHL, rule)


def install() -> None:
    """Wherever MLA decode's kernels for Hopper serve."""
    mla_decode_hopper.attend_splits = mla_values.attend_splits = attend_splits


def _decode_ahead(*operands: Tensor, step: int, **bounds: Any) -> Tensor:
    with mock.patch.object(mla_decode_hopper, "attend_splits", partial(attend_splits, step=step)):
        return mla_decode(*operands, **bounds)


def _spread(number: int, low: int, high: int) -> list[int]:
    """Lengths at even steps of their logarithm, the longest first, as a step's rows come."""
    return [round(high * (low / high) ** (index / (number - 1))) for index in range(number)]


def cases(device: torch.device) -> Iterator[Case]:
    """16 heads of one length and of others; odd shapes; lengths of nothing and of one key."""
    if device.type != "cuda":
        yield _case("3 heads", [70, 70, 0, 200], 3, 16, 512, device, width=(16, 8))
        return
    for number, length in (
        (1, 576), (1, 577), (1, 1000), (1, 4096), (4, 700), (8, 4096), (64, 4096), (128, 4096), (256, 1024), (64, 576),
    ):  # fmt: skip
        yield _case(f"{number}x{length}", [length] * number, 16, 64, length, device)
    yield _case("64 of 512..7500", _spread(64, 512, 7500), 16, 64, 8192, device)
    yield _case("13 heads, pages of 16, 32x4090", [4090] * 32, 13, 16, 8192, device)
    yield _case("27 heads, 64x2048", [2048] * 64, 27, 64, 2048, device)
    yield _case("13 heads, pages of 32, 4 of 1..700", [700, 1, 90, 515], 13, 32, 1024, device)
    yield _case("none and one among 100", [0, 1, 100, 64] * 25, 16, 64, 128, device)
    yield _case("5 of none, one and others", [0, 1, 129, 1000, 65], 16, 64, 1024, device)


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
    operands = _rotation(lens, num_heads, page, bound, device, width)
    forms: dict[str, list[Call]] = {"in use": [partial(mla_decode, *each, **bounds) for each in operands]}
    for form, step in (("ahead", 16), ("ahead, turns of 64", 64)):
        forms[form] = [partial(_decode_ahead, *each, step=step, **bounds) for each in operands]
    return Case(name, forms)


def _rotation(
    lens: Sequence[int], num_heads: int, page: int, bound: int, device: torch.device, width: tuple[int, int]
) -> list[tuple[Tensor, ...]]:
    """Operands of as many calls as read more than a cache holds: latents in scattered pages, NaN behind every
    sequence, wild ids behind every last page."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_calls = rotation_length(sum(lens) * sum(width) * dtype.itemsize) if device.type == "cuda" else 2
    kv_lens_B = torch.tensor(list(lens), dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(sum(lens))
    found: list[tuple[Tensor, ...]] = []
    for _ in range(num_calls):
        cache_NPX, table_BM = _pages(lens, page, bound, sum(width), dtype, device, generator)
        q_BHX = torch.empty(len(lens), num_heads, sum(width), dtype=dtype, device=device).normal_()
        found.append((q_BHX[..., : width[0]], q_BHX[..., width[0] :], cache_NPX, table_BM, kv_lens_B))
    return found


def _pages(
    lens: Sequence[int],
    page: int,
    bound: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    counts = [cdiv(length, page) for length in lens]
    cache_NPX = torch.empty(sum(counts) + 1, page, width, dtype=dtype, device=device).normal_()
    cache_NPX[-1] = torch.nan
    order_N = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    table_BM = torch.full((len(lens), cdiv(bound, page)), 0x7FFFFFFF, dtype=torch.int32)
    used = 0
    for sequence, count in enumerate(counts):
        table_BM[sequence, :count] = order_N[used : used + count]
        used += count
    ends = [(int(table_BM[b, n - 1]), lens[b] % page) for b, n in enumerate(counts) if n and lens[b] % page]
    if ends:
        last_I, length_I = (torch.tensor(each, device=device) for each in zip(*ends, strict=True))
        behind_IP = torch.arange(page, device=device) >= length_I[:, None]
        cache_NPX[last_I] = cache_NPX[last_I].masked_fill(behind_IP[..., None], torch.nan)
    return cache_NPX, table_BM.to(device)
