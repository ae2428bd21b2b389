"""Absorbed latent attention on Hopper (H100, H200): tiles by TMA, products by wgmma, in Gluon. Same result as
`kernels/mla_decode.py`, whose reference defines it; bits of its own.

Knows widths and pages, and which kernel serves how many heads. In both, one warp copies latents ahead of the others,
from one piece of work into the next, and a latent is copied once for both products. With few heads programs find their
work by the lengths (mla_runs.py); with many they take it from a list, one of a step for all its layers (mla_order.py).
"""
# pyright: reportCallIssue=false

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.checks import cdiv, next_power_of_2
from kernels.dependent_launch import dependent_launch
from kernels.mla_few_heads import few_heads_kernel
from kernels.mla_many_heads import many_heads_kernel
from kernels.mla_merge import Splits, merge_parts
from kernels.mla_order import PieceList, list_bytes, list_pieces
from kernels.split_kv import SplitRule, split_workspace
from kernels.tiles import device_generation

_FEW_HEADS = 32
_HEAD_TILE = 64
"""Heads of a piece, where they are more than few."""


def runs_on_hopper(q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache_NPX: Tensor) -> bool:
    """Whether these kernels take this model's operands on this GPU: never a matter of the batch."""
    page_size, width = cache_NPX.shape[1:]
    return (
        device_generation(q_latent_BHL) == 9
        and q_latent_BHL.dtype in (torch.bfloat16, torch.float16)
        and q_latent_BHL.shape[2] == 512
        and q_pe_BHR.shape[2] == 64
        and page_size % 16 == 0
        and all(stride % 16 == 0 for q in (q_latent_BHL, q_pe_BHR) for stride in q.stride()[:2])
        and all(x.data_ptr() % 16 == 0 for x in (q_latent_BHL, q_pe_BHR, cache_NPX))  # copied 16 bytes at a time
        and (page_size % 64 == 0 or 64 % page_size == 0)
        and cache_NPX.stride() == (page_size * width, width, 1)
    )


def split_rule(num_heads: int) -> SplitRule:
    """With many heads a split's result (H * L) weighs as much as its keys, and few keys are work enough."""
    return SplitRule(128, few=8) if num_heads <= _FEW_HEADS else SplitRule(512, few=4)


def list_rule(q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache_NPX: Tensor) -> SplitRule | None:
    """By which the pieces of a step are listed for such operands; None: they are attended to without a list."""
    num_heads = q_latent_BHL.shape[1]
    listed = num_heads > _FEW_HEADS and runs_on_hopper(q_latent_BHL, q_pe_BHR, cache_NPX)
    return split_rule(num_heads) if listed else None


def most_list_bytes(num_sequences: int, num_heads: int, max_kv_len: int) -> int:
    """Of a step's list, none above so many sequences of at most this length.

    >>> most_list_bytes(256, 16, 8192), most_list_bytes(256, 128, 8192), most_list_bytes(1024, 128, 131072)
    (0, 16400, 1048592)
    """
    return list_bytes(num_sequences, split_rule(num_heads).most(max_kv_len)) if num_heads > _FEW_HEADS else 0


def mla_decode_hopper(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    pieces: PieceList | None = None,
) -> Tensor:
    """o_latent_BHL, as two launches: the splits, then the merge of those that no program had together. `pieces`: see
    `attend_splits`."""
    operands = (q_latent_BHL, q_pe_BHR, cache_NPX, block_tables_BM, kv_lens_B)
    splits = attend_splits(*operands, scale=scale, max_kv_len=max_kv_len, pieces=pieces)
    if splits.parts_BSHL.shape[1] > 1:
        merge_parts(splits, kv_lens_B)
    return splits.out_BHL


def attend_splits(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    max_kv_len: int,
    pieces: PieceList | None = None,
) -> Splits:
    """The first of the two launches. It does not wait for the one before it to read keys, but for each sequence's
    newest: the launch right before may write that one alone. With many heads nor to read the list, `list_pieces` by
    `list_rule` for these lengths and this max_kv_len; where None is given it is made here, one launch more, and waited
    for. With few heads `pieces` is not read."""
    num_sequences, num_heads, latent = q_latent_BHL.shape
    rule, device, launch = split_rule(num_heads), q_latent_BHL.device, dependent_launch(q_latent_BHL)
    splits = rule.most(max_kv_len)
    # Latents come out of a norm, so a half holds their means, and rounds eight times finer than bf16 does in the end.
    parts_BSHL, lse_BSH = split_workspace(num_sequences, splits, num_heads, latent, torch.float16, device)
    out_BHL, whole_B = q_latent_BHL.new_empty(num_sequences, num_heads, latent), None
    desc = TensorDescriptor.from_tensor(
        cache_NPX.flatten(0, 1), [min(cache_NPX.shape[1], 64), 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    if num_heads <= _FEW_HEADS:
        whole_B = torch.empty(num_sequences, dtype=torch.int32, device=device)
        few_heads_kernel[(min(num_sequences * splits, programs),)](
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
            PAGE=cache_NPX.shape[1],
            SPLIT_LEN=rule.length,
            FEW_SPLITS=rule.few,
            BLOCK_H=max(16, next_power_of_2(num_heads)),
            num_warps=4,
            **launch,
        )
        return Splits(parts_BSHL, lse_BSH, whole_B, out_BHL, rule)
    if pieces is None:
        pieces, launch = list_pieces(kv_lens_B, rule, max_kv_len=max_kv_len), {"PDL": False}
    room = pieces.pieces_I4.shape[0]
    assert room == num_sequences * splits, f"a list of {room} pieces for {num_sequences} sequences of {splits} splits"
    of_queries = ([1, _HEAD_TILE, 64], gl.NVMMASharedLayout(128, 16, 3))
    many_heads_kernel[(min(num_sequences * splits * cdiv(num_heads, _HEAD_TILE), programs),)](
        TensorDescriptor.from_tensor(q_latent_BHL, *of_queries),
        TensorDescriptor.from_tensor(q_pe_BHR, *of_queries),
        desc,
        block_tables_BM,
        *pieces,
        out_BHL,
        parts_BSHL,
        lse_BSH,
        scale * log2(e),
        splits,
        num_heads,
        block_tables_BM.stride(0),
        PAGE=cache_NPX.shape[1],
        num_warps=4,
        **launch,
    )
    return Splits(parts_BSHL, lse_BSH, None, out_BHL, rule)
