"""MLA decode with many heads by a list of its pieces, longest first, made on the device once a step and taken by a
counter, where pieces i, i + 132, ... were dealt out (kernels/mla_many_heads.py); queries and a launch's first latents
come earlier. Predicted, us with the merge, 128 heads: 64 of 512 to 7500 keys 211 -> 107 (a program's mean 88, merge
13), 200 of 100 to 2000 141 -> 101; 64 x 4096 153 -> 147, 128 x 4096 306 -> 294, 256 x 1024 198 -> 186, 1 x 4096 and 8
x 4096 -1 to -2. With the merge of mla_few_merge.py in its place 64 x 4096 144 to 145, 128 x 4096 289, 256 x 1024 176
to 179.

The reckoning. docs/log.md's times without the merge (144.4, 282, 162) fit 5 us a launch, 4.4 a piece, 1.875 a tile of
64 keys: 4 pieces of 16 tiles for the busiest of 132 programs, 8 of 16, 8 of 8. The same costs, dealt out as today,
give 198 us for 64 of 512 to 7500 keys (201 measured). Simulated, us of the busiest program without launch and merge,
as dealt today / from a sorted list by turns, every other one backwards / from it by a counter / mean: 64 of 512 to
7500 evenly drawn 215, 149, 134, 130; one of 32768 with 100 of 200 to 1500 143, 103, 71, 68; 256 drawn with a mean of
1050 282, 190, 163, 162; equal lengths alike, and with multiprocessors and pieces that differ by 3 and 4 % 149 by
turns, 144 by the counter. So the counter has it; `by_turns` stays a form here, should asking cost more than reckoned.
It is asked when the last latents of a piece have been asked for, two tiles (3.7 us) before the groups are done with
them: its answer, the piece's words and its first page's number take some 2 us. Of a piece's 4.4 us some 1.5 are
fetching queries (its length, then 73 KB, both waited for): they come by the copy engine behind the next piece's first
tile, when the last scores of this one are there.

Bits are the same: where a sequence is cut follows from its length, and the loop's sums are as they were (in machine
code, too, as many of each floating-point instruction). No register is spilt on Triton 3.6 and 3.7.1 with pages of 16
and 64 (208 for the right group, 40 for the copying warp); barriers, counter and board were run through in Python in
6000 random orders, two launches of up to three programs each, without a deadlock or a stale note.

To land it (`list_rule`, `list_pieces`, `attend_pieces` and their tests as they stand):
- kernels/mla_order.py from _mla_piece_list_order.py; kernels/mla_many_heads.py from _mla_piece_list_kernel.py, whose
  BY_TURNS goes. `mla_decode`, `mla_decode_triton`, `mla_decode_hopper`, `attend_splits` and `mla_decode_values` take
  `pieces: PieceList | None = None`; for more than 32 heads None means that the list is made there, one launch more,
  and not read ahead of that: there is one way to deal. `attend_splits` calls `attend_pieces`; fetch_queries stays for
  few heads.
- moe/model/mla.py: `list_rule` as `MLAttention.decode_rule(cache)`, beside `piece_queries`; `_decode` takes the list
  from `plan.decode_pieces`. moe/model/attention.py's answers None.
- moe/model/step_plan.py: `StepPlan.decode_pieces: PieceList | None = None`; `plan_step` takes `decode_rule` and asks
  `step_pieces`. moe/model/causal_lm.py: `_plan` passes `self.blocks[0].attention.decode_rule(kv_cache)` where the
  step decodes. That is behind `decode_inputs` and ahead of the embedding, in the graph where there is one; each half
  of a step plans for itself, so it has a list and a counter of its own.
- moe/engine/workspace.py: `peak` adds `list_bytes(rows, mla_splits(H, max_model_len))` to a decode step with more
  than 32 heads over a latent (256 rows of up to 8192 keys: 16 KB; 1024 of up to 131072: 1 MB). A graph keeps it in
  its pool.
- launch/bench_attention.py: `_mla_call` makes the list outside of its call, as `_bench_call` does.
- Tests: `list_pieces` against its reference and a sort in Python (lengths 0, 1, 64, 65, equal ones, more than 256
  sequences, beyond 131072), no sequence at all, twice with one list (the counter is zero again); of many heads
  tests/test_kernels/test_mla_decode_hopper.py as it is, whose "any company" and "only empty sequences" are the hard
  ones; fewer pieces than programs; a step in graphs against the eager one.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import e, log2
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.drafts._mla_piece_list_kernel import listed_heads_kernel
from benchmarks.drafts._mla_piece_list_operands import rotation, spread
from benchmarks.drafts._mla_piece_list_order import PieceList, list_pieces, list_pieces_reference
from benchmarks.drafts.case import Case
from benchmarks.drafts.mla_few_merge import merge_at_once
from kernels import mla_decode_hopper, mla_values
from kernels.checks import cdiv
from kernels.dependent_launch import dependent_launch
from kernels.linear import head_linear
from kernels.mla_decode import check_operands, mla_decode
from kernels.mla_decode_hopper import runs_on_hopper, split_rule
from kernels.mla_merge import Splits
from kernels.mla_values import _MOST_BYTES, _ROWS, mla_decode_values
from kernels.split_kv import SplitRule, split_workspace
from kv_cache.layout import LayerCache
from launch import bench_attention
from launch.replay import Call
from moe.model.causal_lm import CausalLM
from moe.model.mla import MLAttention
from moe.model.step_input import DecodeBatch, StepInput
from moe.model.step_plan import StepPlan

_FEW_HEADS = 32
_HEAD_TILE = 64

_decode_values_in_use, _call_in_use = mla_decode_values, bench_attention._mla_call


def attend_pieces(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    pieces: PieceList | None,
    *,
    scale: float,
    max_kv_len: int,
    by_turns: bool = False,
) -> Splits:
    """`attend_splits` of more than 32 heads: the pieces of the list, which was made for this bound on the lengths. The
    list, and of the keys all but each sequence's newest, are older than the launch right before, which it does not wait
    for to read them. None: the list is made here, and waited for. `by_turns`: pieces are dealt out by their place in
    the list, without the counter."""
    num_sequences, num_heads, latent = q_latent_BHL.shape
    device, page_size, rule = q_latent_BHL.device, cache_NPX.shape[1], split_rule(num_heads)
    splits, launch = rule.most(max_kv_len), dependent_launch(q_latent_BHL)
    if pieces is None:
        pieces, launch = list_pieces(kv_lens_B, rule, max_kv_len=max_kv_len), {"PDL": False}
    assert pieces.pieces_I4.shape[0] == num_sequences * splits, (
        f"a list with room for {pieces.pieces_I4.shape[0]} pieces, of {num_sequences} sequences of {splits} splits"
    )
    # Latents come out of a norm, so a half holds their means, and rounds eight times finer than bf16 does in the end.
    parts_BSHL, lse_BSH = split_workspace(num_sequences, splits, num_heads, latent, torch.float16, device)
    out_BHL = q_latent_BHL.new_empty(num_sequences, num_heads, latent)
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    of_queries = ([1, _HEAD_TILE, 64], gl.NVMMASharedLayout(128, 16, 3))
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    listed_heads_kernel[(min(num_sequences * splits * cdiv(num_heads, _HEAD_TILE), programs),)](
        TensorDescriptor.from_tensor(q_latent_BHL, *of_queries),
        TensorDescriptor.from_tensor(q_pe_BHR, *of_queries),
        TensorDescriptor.from_tensor(cache_NPX.flatten(0, 1), [min(page_size, 64), 64], swizzled),
        block_tables_BM,
        *pieces,
        out_BHL,
        parts_BSHL,
        lse_BSH,
        scale * log2(e),
        splits,
        num_heads,
        block_tables_BM.stride(0),
        PAGE=page_size,
        BY_TURNS=by_turns,
        num_warps=4,
        **launch,
    )
    return Splits(parts_BSHL, lse_BSH, None, out_BHL, rule)


def mla_decode_listed(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    pieces: PieceList | None,
    *,
    scale: float,
    max_kv_len: int,
    by_turns: bool = False,
    merge: Callable[[Splits, Tensor], None] | None = None,
) -> Tensor:
    """`mla_decode` of operands for which `list_rule` gives a rule. `merge`: None is the one in use."""
    operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    check_operands(*operands, None)
    splits = attend_pieces(*operands, pieces, scale=scale, max_kv_len=max_kv_len, by_turns=by_turns)
    if splits.parts_BSHL.shape[1] > 1:
        (merge or mla_decode_hopper.merge_parts)(splits, kv_lens_B)
    return splits.out_BHL


def mla_decode_values_listed(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    w_HVL: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    scales_NP2: Tensor | None = None,
    pieces: PieceList | None = None,
) -> Tensor:
    """`mla_decode_values`, by the step's list where it has one."""
    operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    bounds: dict[str, Any] = {"scale": scale, "max_kv_len": max_kv_len}
    if pieces is None or not kv_lens_B.shape[0] or not max_kv_len:
        return _decode_values_in_use(*operands, w_HVL, **bounds, scales_NP2=scales_NP2)
    if cdiv(kv_lens_B.shape[0], _ROWS) * w_HVL.numel() * w_HVL.element_size() <= _MOST_BYTES:
        check_operands(*operands, None)
        return mla_values.values_of_splits(attend_pieces(*operands, pieces, **bounds), kv_lens_B, w_HVL)
    return head_linear(mla_decode_listed(*operands, pieces, **bounds), w_HVL)


def list_rule(attention: object, cache: LayerCache) -> SplitRule | None:
    """By which the pieces of decode are listed; None: it reads no list. Asked, as `piece_queries`, with operands laid
    out as a step's, without rows: the answer is the model's, never the batch's."""
    if not isinstance(attention, MLAttention) or cache.scales is not None or attention.dims.num_heads <= _FEW_HEADS:
        return None
    dims, weight_NK = attention.dims, attention.kv_b.weight_NK
    row, heads = (attention.q_b or attention.q_kv_a).weight_NK.shape[0], (0, dims.num_heads)
    q_latent_BHL = weight_NK.new_empty(*heads, dims.kv_lora_rank)
    q_pe_BHR = weight_NK.new_empty_strided((*heads, dims.qk_rope_head_dim), (row, dims.qk_head_dim, 1))
    return split_rule(dims.num_heads) if runs_on_hopper(q_latent_BHL, q_pe_BHR, cache.values) else None


def step_pieces(step: StepInput, rule: SplitRule | None) -> PieceList | None:
    """The list of a step for all its layers; one launch, which waits for nothing but the lengths."""
    if rule is None or step.decode is None:
        return None
    return list_pieces(step.decode.kv_lens_B, rule, max_kv_len=step.decode.max_kv_len)


# What follows brings the list to the layers without touching them: see above for the places where it would land.


@dataclass(frozen=True)
class _ListedBatch(DecodeBatch):
    pieces: PieceList | None = None


def _plan_with_list(plan_in_use: Any, self: CausalLM, step: StepInput, kv_cache: LayerCache, *rest: Any) -> StepPlan:
    plan, decode = plan_in_use(self, step, kv_cache, *rest), step.decode
    pieces = step_pieces(step, list_rule(self.blocks[0].attention, kv_cache))
    if pieces is None or decode is None:
        return plan
    listed = _ListedBatch(decode.block_tables_BM, decode.kv_lens_B, decode.max_kv_len, pieces)
    return replace(plan, step=replace(step, decode=listed))


def _decode(
    self: MLAttention, q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache: LayerCache, decode: DecodeBatch
) -> Tensor:
    return mla_decode_values_listed(
        q_latent_BHL,
        q_pe_BHR,
        cache.values,
        decode.block_tables_BM,
        decode.kv_lens_B,
        self.w_uv_HVL,
        scale=self.scale,
        max_kv_len=decode.max_kv_len,
        scales_NP2=cache.scales,
        pieces=decode.pieces if isinstance(decode, _ListedBatch) else None,
    )


def _bench_call(layout: Any, pool: Any, table_BM: Tensor, kv_lens_B: Tensor, length: int) -> Call:
    """A call of w5; as in a step, the list is no layer's work."""
    if layout.num_heads <= _FEW_HEADS or pool.device.type != "cuda":
        return _call_in_use(layout, pool, table_BM, kv_lens_B, length)
    q_BHL = bench_attention._queries(layout, table_BM.shape[0], layout.width, pool.device)
    q_pe_BHR = bench_attention._queries(layout, table_BM.shape[0], layout.rope, pool.device)
    assert runs_on_hopper(q_BHL, q_pe_BHR, pool.cache), "the draft is Hopper's"
    operands = (q_BHL, q_pe_BHR, pool.cache, table_BM, kv_lens_B)
    pieces = list_pieces(kv_lens_B, split_rule(layout.num_heads), max_kv_len=length)
    return lambda: mla_decode_listed(*operands, pieces, scale=layout.scale, max_kv_len=length)


def install() -> None:
    """Every step of a network with more than 32 heads over a latent, and w5."""
    plan_in_use = CausalLM._plan
    setattr(CausalLM, "_plan", lambda self, *args: _plan_with_list(plan_in_use, self, *args))  # noqa: B010
    setattr(MLAttention, "_decode", _decode)  # noqa: B010
    bench_attention._mla_call = _bench_call


def cases(device: torch.device) -> Iterator[Case]:
    """128 heads of equal and of unequal lengths, these under the bound of a step's graph; an odd shape; the list."""
    if device.type != "cuda":
        yield _case("3 heads", [0, 1, 70, 200], 3, 16, 512, device, width=(16, 8))
        yield _list_case("4 sequences", [0, 1, 70, 7000], 8192, device)
        return
    for number, length in ((1, 4096), (8, 4096), (64, 4096), (128, 4096), (256, 1024)):
        yield _case(f"{number}x{length}", [length] * number, 128, 64, length, device)
    yield _case("64 of 512..7500", spread(64, 512, 7500), 128, 64, 8192, device)
    yield _case("200 of 100..2000", spread(200, 100, 2000), 128, 64, 2048, device)
    odd = [0, 1, 63, 64, 65, 512, 513, 2049, 4096, 4097, 9000] * 12
    yield _case("123 heads, pages of 16, odd lengths", odd, 123, 16, 32768, device)
    yield _list_case("512 of 100..7500, list alone", spread(512, 100, 7500), 8192, device)


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
        return Case(name, forms | {"list": forms["in use"]})
    pieces = list_pieces(operands[0][-1], split_rule(num_heads), max_kv_len=bound)
    others: dict[str, dict[str, Any]] = {"list": {}, "list, at once": {"merge": merge_at_once}}
    if page == 64:  # each form of the kernel is seconds of compiling
        others["list by turns"] = {"by_turns": True}
    for form, other in others.items():
        listed = partial(mla_decode_listed, pieces=pieces, **bounds, **other)
        forms[form] = [partial(listed, *each) for each in operands]
    return Case(name, forms)


def _list_case(name: str, lens: Sequence[int], bound: int, device: torch.device) -> Case:
    """What lies behind the last piece means nothing, and is left out."""
    kv_lens_B, rule = torch.tensor(list(lens), dtype=torch.int32, device=device), SplitRule(512, few=4)

    def call(make: Any) -> tuple[Tensor, Tensor]:
        pieces_I4, counts = make(kv_lens_B, rule, max_kv_len=bound)
        there_I = torch.arange(pieces_I4.shape[0], device=device) < counts[0]
        return torch.where(there_I[:, None], pieces_I4, 0), counts[:2]

    return Case(name, {"reference": [partial(call, list_pieces_reference)], "list": [partial(call, list_pieces)]})
