"""Absorbed latent attention on Hopper (H100, H200): tiles by TMA, products by wgmma, in Gluon. Same result as
`kernels/mla_decode.py`, whose reference defines it; bits of its own.

Knows widths and pages, and which kernel serves how many heads. In both, one warp copies latents ahead of the others,
from one piece of work into the next, and a latent is copied once for both products.
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
from kernels.split_kv import SplitRule
from kernels.tiles import device_generation

_FEW_HEADS = 32


def runs_on_hopper(q_latent_BHL: Tensor, q_pe_BHR: Tensor, cache_NPX: Tensor) -> bool:
    """Whether these kernels take this model's operands on this GPU: never a matter of the batch."""
    page_size, width = cache_NPX.shape[1:]
    return (
        device_generation(q_latent_BHL) == 9
        and q_latent_BHL.dtype in (torch.bfloat16, torch.float16)
        and q_latent_BHL.shape[2] == 512
        and q_pe_BHR.shape[2] == 64
        and page_size % 16 == 0
        and (page_size % 64 == 0 or 64 % page_size == 0)
        and cache_NPX.stride() == (page_size * width, width, 1)
        and cache_NPX.data_ptr() % 16 == 0
    )


def mla_decode_hopper(
    q_latent_BHL: Tensor,
    q_pe_BHR: Tensor,
    cache_NPX: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    out_BHL: Tensor,
    parts_BSHL: Tensor,
    lse_BSH: Tensor,
    rule: SplitRule,
    *,
    scale: float,
) -> None:
    """Fills out_BHL where a sequence has one split, parts_BSHL and lse_BSH elsewhere."""
    num_sequences, splits, num_heads, _ = parts_BSHL.shape
    page_size = cache_NPX.shape[1]
    few = num_heads <= _FEW_HEADS
    block_h = max(16, next_power_of_2(num_heads)) if few else 64
    num_pieces = num_sequences * splits * (1 if few else cdiv(num_heads, block_h))
    desc = TensorDescriptor.from_tensor(
        cache_NPX.flatten(0, 1), [min(page_size, 64), 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    programs = torch.cuda.get_device_properties(q_latent_BHL.device).multi_processor_count
    (few_heads_kernel if few else many_heads_kernel)[(min(num_pieces, programs),)](
        q_latent_BHL,
        q_pe_BHR,
        desc,
        block_tables_BM,
        kv_lens_B,
        out_BHL,
        parts_BSHL,
        lse_BSH,
        scale * log2(e),
        num_pieces,
        num_sequences,
        splits,
        num_heads,
        *q_latent_BHL.stride()[:2],
        *q_pe_BHR.stride()[:2],
        block_tables_BM.stride(0),
        PAGE=page_size,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        BLOCK_H=block_h,
        STAGES=2,
        num_warps=4,
        **dependent_launch(q_latent_BHL),
    )
