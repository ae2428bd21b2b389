"""MLA's value map with the merge of splits, of few rows, with all splits on their way at once (kernels/mla_values.py).
Predicted: dsv2-lite -1.2 to -2.0 us a layer at one row (-30 to -55 us a step); with wgmma 0.2 to 0.3 us more.

Today's chain from the wait to the store, in sm_90 machine code, five splits (576 keys): ptxas holds to 40 registers and
puts each split's logarithm and part behind the sums of the one before it. Rounds of L2: whole_ptr; split 0; 1; 2; 3; 4:
six. Then 32 products in a row over K = 512 (HMMA, some 33 cycles each, 0.55 us). Here splits are carried into the loop
that merges them: the loads of eight stand ahead of it, or at the end of the turn before, without a use between them, so
in one round (52 registers), together with whole_ptr and the latent of a sequence that is done. Five rounds less, at 0.3
us (an L2 hit alone) to 0.6; heads are known when it is compiled, so that little is computed behind the wait.

`WGMMA`: weights are the product's 64 rows, the latent its 16 columns, so that Triton takes wgmma, whose steps follow
each other in some 20 cycles (0.35 us for 0.55); half as many programs. Both add as today, k ascending in one fp32 sum.

To land it: `_value_rows_kernel` beside `_values_kernel` where there are at most eight sequences (BLOCK_M = 1 goes
there). Test: test_mla_values.py has the bits against the two launches; add lengths beyond 4096 (two turns of the loop)
and whole_B = 1 with several splits, which the grid of few rows never makes by itself.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.drafts.case import Case
from kernels import mla_values as in_use
from kernels.checks import assert_last_contiguous, assert_shape, cdiv
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear import head_linear_reference
from kernels.mla_decode_hopper import split_rule
from kernels.mla_merge import Splits, merge_step
from kernels.row_tiles import multiply
from kernels.split_kv import SplitRule, split_bounds
from launch.replay import rotation_length

_values_of_splits = in_use.values_of_splits  # what it falls back to, also when installed

_MOST_ROWS = 8

# y[b, h] = w[h] x[b, h]; x[b, h] = out[b, h] where a sequence has one split at most or is whole, else the merge of its
#   parts (kernels/mla_merge.py), rounded to out's dtype
#   parts_ptr [B, S, H, L], lse_ptr fp32 [B, S, H], out_ptr [B, H, L], y_ptr [B, H, V], contiguous; w_ptr [H, V, L], H
#   and V strided; int32 [B]: kv_lens_ptr, whole_ptr (or None)
#   grid (cdiv(V, BLOCK_N), B, H): a program owns BLOCK_N columns of one sequence's head, and merges its whole latent.
#   fp32 sums. The tensor core wants 16 rows: they are all the same. Columns from V on are masked.


@triton.jit
def _splits_from(parts_ptrs, lse_ptr, first, splits, HEADS: tl.constexpr, LATENT: tl.constexpr, CHUNK: tl.constexpr):
    """(logarithms [1], parts [1, L]) of CHUNK splits, of which `first` is the first. One behind the last changes no bit
    of the merge: see mla_merge.py."""
    lses, parts = (), ()
    for i in tl.static_range(CHUNK):
        lses += (tl.load(lse_ptr + i * HEADS, mask=first + i < splits, other=float("-inf")),)
        parts += (tl.load(parts_ptrs + i * (HEADS * LATENT), mask=first + i < splits, other=-0.0),)
    return lses, parts


@triton.jit(do_not_specialize=["num_splits"])
def _value_rows_kernel(
    parts_ptr,
    lse_ptr,
    kv_lens_ptr,
    whole_ptr,
    out_ptr,
    w_ptr,
    y_ptr,
    num_splits,
    num_columns,
    stride_wh,
    stride_wn,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    WGMMA: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, LATENT)
    kv_len = tl.load(kv_lens_ptr + sequence)
    _, _, splits = split_bounds(kv_len, 0, SPLIT_LEN, FEW_SPLITS, 0)  # pyright: ignore
    w_ptrs = w_ptr + head.to(tl.int64) * stride_wh + n[None, :] * stride_wn + k[:, None]
    w = tl.load(w_ptrs, mask=(n < num_columns)[None, :], other=0.0)
    row, first_row = sequence * HEADS + head, sequence * num_splits * HEADS + head
    parts_ptrs, lse_ptr = parts_ptr + first_row * LATENT + k[None, :], lse_ptr + first_row
    wait_for_inputs(PDL)  # lengths and weights are older than the launch before
    # Where a sequence is done its latent lies in `out`, else in parts: both are asked for before it is known which.
    whole = 0
    if whole_ptr is not None:
        whole = tl.load(whole_ptr + sequence)
    x = tl.load(out_ptr + row * LATENT + k[None, :])
    lses, parts = _splits_from(parts_ptrs, lse_ptr, 0, splits, HEADS, LATENT, CHUNK)
    parted = (splits > 1) & (whole == 0)
    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, LATENT), tl.float32)
    # Splits come from the turn before: what a loop carries is asked for outside of the sums, all of it at once.
    for first in range(0, tl.where(parted, splits, 0), CHUNK):
        for i in tl.static_range(CHUNK):
            maximum, total, acc = merge_step(maximum, total, acc, lses[i], parts[i])  # pyright: ignore
        parts_ptrs, lse_ptr = parts_ptrs + CHUNK * HEADS * LATENT, lse_ptr + CHUNK * HEADS
        lses, parts = _splits_from(parts_ptrs, lse_ptr, first + CHUNK, splits, HEADS, LATENT, CHUNK)
    if parted:
        x = (acc / total[:, None]).to(x.dtype)
    ROWS: tl.constexpr = 16
    x = tl.broadcast_to(x, (ROWS, LATENT))
    r, y_ptrs = tl.arange(0, ROWS), y_ptr + row * num_columns + n
    if WGMMA:
        y = multiply(x, w, tl.zeros((BLOCK_N, ROWS), tl.float32), True)  # pyright: ignore
        inside = (n < num_columns)[:, None] & (r == 0)[None, :]
        tl.store(y_ptrs[:, None] + 0 * r[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        y = multiply(x, w, tl.zeros((ROWS, BLOCK_N), tl.float32), False)  # pyright: ignore
        inside = (r == 0)[:, None] & (n < num_columns)[None, :]
        tl.store(y_ptrs[None, :] + 0 * r[:, None], y.to(y_ptr.dtype.element_ty), mask=inside)


def values_of_splits(splits: Splits, kv_lens_B: Tensor, w_HVL: Tensor, *, wgmma: bool = False) -> Tensor:
    """As in kernels/mla_values.py."""
    num_sequences, most, num_heads, latent = splits.parts_BSHL.shape
    if num_sequences > _MOST_ROWS:
        return _values_of_splits(splits, kv_lens_B, w_HVL)
    assert_shape("w_HVL", w_HVL, (num_heads, None, latent))
    assert_last_contiguous("w_HVL", w_HVL)
    assert splits.out_BHL.dtype == w_HVL.dtype, f"latents are {splits.out_BHL.dtype}, weights {w_HVL.dtype}"
    num_columns, block_n = w_HVL.shape[1], 64 if wgmma else 32
    y_BHV = splits.out_BHL.new_empty(num_sequences, num_heads, num_columns)
    _value_rows_kernel[(cdiv(num_columns, block_n), num_sequences, num_heads)](
        splits.parts_BSHL,
        splits.lse_BSH,
        kv_lens_B,
        splits.whole_B,
        splits.out_BHL,
        w_HVL,
        y_BHV,
        most,
        num_columns,
        *w_HVL.stride()[:2],
        HEADS=num_heads,
        LATENT=latent,
        BLOCK_N=block_n,
        CHUNK=8,
        SPLIT_LEN=splits.rule.length,
        FEW_SPLITS=splits.rule.few,
        WGMMA=wgmma,
        num_warps=4,
        **dependent_launch(w_HVL),
    )
    return y_BHV


def _number_of_splits(rule: SplitRule, kv_len: int) -> int:
    """Of a sequence of up to 64 of the longest splits, as kernels/split_kv.py cuts it."""
    longer = next(times for times in (1, 2, 4) if times == 4 or kv_len <= times * rule.few * rule.length)
    return cdiv(kv_len, longer * rule.length)


def _values_reference(splits: Splits, kv_lens_B: Tensor, w_HVL: Tensor) -> Tensor:
    """What the kernels do, step by step; the product by its own reference."""
    x_BHL = splits.out_BHL.clone()
    for b, kv_len in enumerate(kv_lens_B.tolist()):
        number = _number_of_splits(splits.rule, kv_len)
        if number <= 1 or (splits.whole_B is not None and splits.whole_B[b]):
            continue
        lse_SH = splits.lse_BSH[b, :number]
        weight_SH = torch.exp2(lse_SH - lse_SH.amax(0))
        merged_HL = (weight_SH[..., None] * splits.parts_BSHL[b, :number].float()).sum(0) / weight_SH.sum(0)[:, None]
        x_BHL[b] = merged_HL.to(x_BHL.dtype)
    return head_linear_reference(x_BHL, w_HVL)


def cases(device: torch.device) -> Iterator[Case]:
    """dsv2-lite's one row, short and long; eight rows of all kinds; heads and columns that are no powers of two."""
    cuda = device.type == "cuda"
    shapes = [
        ("dsv2-lite 1 row, 576 keys", [576], 16, 128, 512, False),
        ("dsv2-lite 1 row, 4096 keys", [4096], 16, 128, 512, False),
        ("8 rows, 0 to 5000 keys, one whole", [0, 1, 128, 129, 1024, 1025, 5000, 3000], 16, 128, 512, True),
        ("3 rows, 5 heads, 100 columns", [200, 700, 1500], 5, 100, 512, True),
    ]
    for name, lens, heads, columns, latent, whole in shapes if cuda else shapes[::2]:
        if not cuda:
            heads, columns, latent = 2, 40, 64
        rotation = rotation_length(2 * heads * columns * latent, most=64) if cuda else 1
        operands = [_draw(lens, heads, columns, latent, whole, device, seed) for seed in range(rotation)]
        forms = {"in use": _values_of_splits, "at once": values_of_splits}
        if cuda:
            forms["at once, wgmma"] = partial(values_of_splits, wgmma=True)
        elif isinstance(_value_rows_kernel, triton.JITFunction):  # a CPU without the interpreter
            forms = dict.fromkeys(forms, _values_reference)
        else:
            forms["in use"] = _values_reference
        calls = {form: [partial(run, *each) for each in operands] for form, run in forms.items()}
        yield Case(name, calls, tolerance=0.0 if cuda else 1e-5)


def _draw(
    lens: list[int], num_heads: int, num_columns: int, latent: int, whole: bool, device: torch.device, seed: int
) -> tuple[Splits, Tensor, Tensor]:
    """NaN where attention writes nothing: in parts behind a sequence's last split and in all parts of one that is done,
    or else in its row of `out`."""
    generator = torch.Generator(device).manual_seed(seed)
    rule, dtype = split_rule(num_heads), torch.bfloat16 if device.type == "cuda" else torch.float32
    most = rule.most(max(lens))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    parts_BSHL, lse_BSH = draw(len(lens), most, num_heads, latent).half(), draw(len(lens), most, num_heads)
    out_BHL, whole_B = draw(len(lens), num_heads, latent).to(dtype), torch.zeros(len(lens), dtype=torch.int32)
    whole_B[-1] = whole
    for b, kv_len in enumerate(lens):
        number = _number_of_splits(rule, kv_len)
        written = 0 if number <= 1 or whole_B[b] else number
        parts_BSHL[b, written:], lse_BSH[b, written:] = torch.nan, torch.nan
        if written:
            out_BHL[b] = torch.nan
    splits = Splits(parts_BSHL, lse_BSH, whole_B.to(device), out_BHL, rule)
    # A view, as the model's is: the rows of another map stand before it.
    w_HVL = draw(num_heads, 2 * num_columns, latent).to(dtype)[:, num_columns:]
    return splits, torch.tensor(lens, dtype=torch.int32, device=device), w_HVL


def install() -> None:
    in_use.values_of_splits = values_of_splits
