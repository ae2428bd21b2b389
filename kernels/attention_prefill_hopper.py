"""Causal attention of prompt chunks on Hopper (H100, H200): pages by TMA, products by wgmma, in Gluon. Same result as
`kernels/attention_prefill.py`, whose reference defines it; bits of its own.

Knows pages, positions and heads. Its idea: one warp copies pages of keys and values ahead of the others, from one piece
of work into the next; each of two groups of warps, with 64 rows each, multiplies the next tile's queries and keys, and
right behind them this tile's weights and values, and then computes the next weights. Every tile of keys stands at a
fixed position and is worked on by the same instructions whatever the chunk.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.barriers import barriers
from kernels.checks import cdiv
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.prefill_order import PIECE_ROWS, heads_of_piece
from kernels.prefill_pieces import copy_keys_and_values, fetch_queries, prefill_piece, zero_values
from kernels.prefill_weights import mask_scores, store_rows, weigh
from kernels.tiles import device_generation, num_multiprocessors


def runs_on_hopper(q_THC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGV: Tensor, k_rest_NPR: Tensor | None = None) -> bool:
    """Whether this kernel takes this model's operands on this GPU: never a matter of the batch."""
    caches = (k_cache_NPGC, v_cache_NPGV)
    if k_rest_NPR is not None:
        if k_rest_NPR.shape[2] % 64:
            return False
        caches += (k_rest_NPR.unsqueeze(2),)
    page_size, _, value_width = v_cache_NPGV.shape[1:]
    return (
        device_generation(q_THC) == 9
        and q_THC.dtype in (torch.bfloat16, torch.float16)
        and q_THC.shape[2] in (64, 128, 192)
        and value_width in (64, 128)
        and page_size >= 8
        and page_size & (page_size - 1) == 0
        and all(stride % 16 == 0 for stride in q_THC.stride()[:2])  # copied 16 bytes at a time
        and all(map(_has_rows, caches))
    )


def _has_rows(cache_NPGC: Tensor) -> bool:
    """Whether the cache is rows of one pitch, a whole number of them from block to block, as TMA sees memory."""
    block, token, head, _ = cache_NPGC.stride()
    aligned = all(stride % 8 == 0 for stride in (token, head)) and cache_NPGC.data_ptr() % 16 == 0
    return aligned and block % token == 0


# out[i] = sum_j 2^(s[i, j] - max) v[j] / sum_j 2^(s[i, j] - max), s = scale * log2(e) * q . k, tiles of keys in order
#   q_ptr [T, H, C], last stride 1; k_desc, v_desc: the caches as rows of all heads, boxes of min(PAGE, BLOCK_N) x 64,
#   k_ratio, v_ratio rows from block to block; rest_desc, rest_ratio: likewise the last REST * 64 columns of keys, the
#   same for every head, if REST > 0; int32: tables_ptr [B, M], query_starts_ptr [B + 1], query_offsets_ptr,
#   kv_lens_ptr, kv_starts_ptr (or None; multiples of the box) [B], pieces_ptr (or None) [I]; out_ptr [T, H, V],
#   lse_ptr fp32 [T, H] contiguous
#   grid: one program a multiprocessor at most; the programs take turns at the pieces, I or tiles x B of them for each
#   PACK heads, every other turn in reverse. A piece is 128 / PACK queries of PACK heads that share a kv head, the ones
#   that see the most keys first. On 132 multiprocessors the busiest program has 6 % more tiles than the mean of 2 x
#   4096 tokens' pieces (32 heads on 4) if all turns go one way, 1 % so; with 16 heads of their own 12 and 3 %.
#   fp32 accumulation. A tile that a row does not see leaves it exactly as it was. Of keys that no row sees, whole pages
#   are not read (a neighbour stands in), and values are zeroed in shared memory. Rows past the chunk are not written.


@gluon.jit
def _scores(query_chunks, key_chunks, buffer, stage, S: gl.constexpr, COUNT: gl.constexpr):
    """Begin to multiply 64 queries with a tile of keys."""
    BLOCK_N: gl.constexpr = key_chunks.shape[1]
    s = gl.zeros([64, BLOCK_N], gl.float32, S)
    for c in gl.static_range(COUNT):
        k = key_chunks.index(stage * COUNT + c).permute((1, 0))
        s = warpgroup_mma(query_chunks.index(buffer + c), k, s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def _attend(
    q_ptr,
    batch,
    results,
    scale_log2,
    counts,
    num_heads,
    strides,
    query_chunks,
    key_chunks,
    values,
    value_chunks,
    stages,
    HALF: gl.constexpr,
    PACK: gl.constexpr,
    WINDOW: gl.constexpr,
    WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """64 rows of each piece, HALF 0 or 1. With two BUFFERS the next piece's queries come during this one. `results` is
    (out_ptr, lse_ptr); `batch`, `counts`, `stages` and q's `strides` are those of prefill_pieces.py."""
    BLOCK_N: gl.constexpr = key_chunks.shape[1]
    VALUE_WIDTH: gl.constexpr = values.shape[2]
    COUNT: gl.constexpr = WIDTH // 64
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_WIDTH, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    m = HALF * 64 + gl.arange(0, 64, ROW)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    full_keys, full_values, empty_keys, empty_values = stages
    scale = gl.full([64, BLOCK_N], scale_log2, gl.float32, S)
    tiles = 0
    pieces = 0
    if BUFFERS == 2:
        _, head0, first_row, query_len, in_chunk, _, _, _, _, _, _ = prefill_piece(
            gl.program_id(0), batch, counts, PACK, WINDOW, BLOCK_N
        )
        fetch_queries(
            q_ptr, query_chunks, HALF * COUNT, first_row, query_len, in_chunk, head0, strides, HALF, PACK, COUNT
        )
    for piece in range(gl.program_id(0), counts[0], gl.num_programs(0)):
        _, head0, first_row, query_len, in_chunk, query0, _, first, kv_end, begin, end = prefill_piece(
            piece, batch, counts, PACK, WINDOW, BLOCK_N
        )
        buffer = pieces % BUFFERS * 2 * COUNT + HALF * COUNT
        if BUFFERS == 1:
            fetch_queries(
                q_ptr, query_chunks, buffer, first_row, query_len, in_chunk, head0, strides, HALF, PACK, COUNT
            )
        async_copy.wait_group(0)
        fence_async_shared()
        pieces += 1  # noqa: SIM113 - the kernel language knows no enumerate
        if BUFFERS == 2:
            next_piece = gl.minimum(piece + gl.num_programs(0), counts[0] - 1)
            _, next_head0, next_row, next_len, next_in_chunk, _, _, _, _, _, _ = prefill_piece(
                next_piece, batch, counts, PACK, WINDOW, BLOCK_N
            )
            fetch_queries(
                q_ptr, query_chunks, pieces % 2 * 2 * COUNT + HALF * COUNT, next_row, next_len, next_in_chunk,
                next_head0, strides, HALF, PACK, COUNT,
            )  # fmt: skip
        query = query0 + m // PACK
        first_query, last_query = query0 + HALF * 64 // PACK, query0 + (HALF * 64 + 63) // PACK
        maximum = gl.full([64], float("-inf"), gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        out = gl.zeros([64, VALUE_WIDTH], gl.float32, SUM)
        if begin < end:
            stage, phase = tiles % 2, (tiles // 2) & 1
            mbarrier.wait(full_keys.index(stage), phase)
            s = _scores(query_chunks, key_chunks, buffer, stage, S, COUNT)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty_keys.index(stage))
            s = mask_scores(s, begin, n, query, first, kv_end, first_query, last_query, WINDOW)
            maximum, total, decay, p = weigh(s, maximum, total, scale, scale_log2)
            weights = gl.convert_layout(p.to(query_chunks.dtype), WEIGHTS)
            for start in range(begin + BLOCK_N, end, BLOCK_N):
                last_stage, last_phase = stage, phase
                tiles += 1
                stage, phase = tiles % 2, (tiles // 2) & 1
                mbarrier.wait(full_keys.index(stage), phase)
                s = _scores(query_chunks, key_chunks, buffer, stage, S, COUNT)
                mbarrier.wait(full_values.index(last_stage), last_phase)
                if start - BLOCK_N < first:
                    zero_values(value_chunks, last_stage, start - BLOCK_N, first, kv_end, VALUE_WIDTH // 64)
                token = warpgroup_mma(weights, values.index(last_stage), out, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(empty_keys.index(stage))
                s = mask_scores(s, start, n, query, first, kv_end, first_query, last_query, WINDOW)
                maximum, total, decay, p = weigh(s, maximum, total, scale, scale_log2)
                # The assembler moves this wait above the weights. Kept here, by a branch before it, it cost time: 1099
                # us became 1203 to 1310 for 4 x 4096 tokens of qwen3's heads within a prefill step.
                out = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(empty_values.index(last_stage))
                out = out * gl.convert_layout(decay, SUM_ROW)[:, None]
                weights = gl.convert_layout(p.to(query_chunks.dtype), WEIGHTS)
            last = begin + (end - 1 - begin) // BLOCK_N * BLOCK_N
            mbarrier.wait(full_values.index(stage), phase)
            if (last < first) | (last + BLOCK_N > kv_end):
                zero_values(value_chunks, stage, last, first, kv_end, VALUE_WIDTH // 64)
            token = warpgroup_mma(weights, values.index(stage), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(empty_values.index(stage))
            tiles += 1
        store_rows(
            *results, out, maximum, total, first_row, query_len, in_chunk, m, head0, num_heads, SUM,
            VALUE_WIDTH, HALF, PACK,
        )  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["num_pieces", "num_sequences", "stride_tb"])
def _prefill_kernel(
    q_ptr,
    k_desc,
    v_desc,
    rest_desc,
    tables_ptr,
    query_starts_ptr,
    query_offsets_ptr,
    kv_lens_ptr,
    kv_starts_ptr,
    pieces_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_pieces,
    num_sequences,
    num_heads,
    stride_qt,
    stride_qh,
    k_ratio,
    v_ratio,
    rest_ratio,
    stride_kg,
    stride_vg,
    stride_tb,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE: gl.constexpr,
    WIDTH: gl.constexpr,
    VALUE_WIDTH: gl.constexpr,
    WINDOW: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BUFFERS: gl.constexpr,
    PDL: gl.constexpr,
):
    wait_for_inputs(PDL)
    head_tiles = num_heads // PACK
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    K: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    query_chunks = gl.allocate_shared_memory(dtype, [BUFFERS * 2 * WIDTH // 64, 64, 64], K)
    key_chunks = gl.allocate_shared_memory(dtype, [2 * WIDTH // 64, BLOCK_N, 64], K)
    values = gl.allocate_shared_memory(dtype, [2, BLOCK_N, VALUE_WIDTH], K)
    value_chunks = values._reinterpret(dtype, [2 * VALUE_WIDTH // 64, BLOCK_N, 64], K)
    stages = barriers(2, (1, 1, 2, 2))
    batch = (query_starts_ptr, query_offsets_ptr, kv_lens_ptr, kv_starts_ptr, pieces_ptr)
    counts = (num_pieces, num_sequences, head_tiles)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (
                q_ptr, batch, (out_ptr, lse_ptr), scale_log2, counts, num_heads, (stride_qt, stride_qh), query_chunks,
                key_chunks, values, value_chunks, stages, 0, PACK, WINDOW, WIDTH, BUFFERS,
            )),
            (_attend, (
                q_ptr, batch, (out_ptr, lse_ptr), scale_log2, counts, num_heads, (stride_qt, stride_qh), query_chunks,
                key_chunks, values, value_chunks, stages, 1, PACK, WINDOW, WIDTH, BUFFERS,
            )),
            (copy_keys_and_values, (
                (k_desc, v_desc, rest_desc), tables_ptr, batch, counts, (k_ratio, v_ratio, rest_ratio),
                (stride_kg, stride_vg, stride_tb), key_chunks, value_chunks, stages, GROUP, PACK, PAGE, WINDOW, REST,
            )),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


def _rows(cache_NPGC: Tensor, box_rows: int) -> tuple[TensorDescriptor, int]:
    """The cache as rows of all heads, in boxes of `box_rows` x 64, and how many rows lie from block to block."""
    num_blocks, page_size, num_heads, width = cache_NPGC.shape
    block, token, head, _ = cache_NPGC.stride()
    ratio = block // token
    shape = ((num_blocks - 1) * ratio + page_size, (num_heads - 1) * head + width)
    rows = cache_NPGC.as_strided(shape, (token, 1))
    return TensorDescriptor.from_tensor(rows, [box_rows, 64], gl.NVMMASharedLayout(128, 16, 2)), ratio


def attention_prefill_hopper(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    query_offsets_B: Tensor,
    kv_lens_B: Tensor,
    kv_starts_B: Tensor | None,
    out_THV: Tensor,
    lse_TH: Tensor,
    k_rest_NPR: Tensor | None = None,
    pieces_I: Tensor | None = None,
    *,
    scale: float,
    window: int,
    max_query_len: int,
) -> None:
    """Fills out_THV and lse_TH. `pieces_I`: by `order_pieces`; None: chunks are about as long as the longest."""
    num_heads, width = q_THC.shape[1:]
    page_size, num_kv_heads, value_width = v_cache_NPGV.shape[1:]
    num_sequences = block_tables_BM.shape[0]
    group = num_heads // num_kv_heads
    pack = heads_of_piece(num_heads, num_kv_heads)
    block_n = 128
    k_desc, k_ratio = _rows(k_cache_NPGC, min(page_size, block_n))
    v_desc, v_ratio = _rows(v_cache_NPGV, min(page_size, block_n))
    rest_desc, rest_ratio = v_desc, v_ratio
    if k_rest_NPR is not None:
        rest_desc, rest_ratio = _rows(k_rest_NPR.unsqueeze(2), min(page_size, block_n))
    num_tiles = cdiv(max_query_len * pack, PIECE_ROWS) * num_sequences if pieces_I is None else pieces_I.shape[0]
    num_pieces = num_tiles * (num_heads // pack)
    _prefill_kernel[(min(num_pieces, num_multiprocessors(q_THC.device)),)](
        q_THC,
        k_desc,
        v_desc,
        rest_desc,
        block_tables_BM,
        query_starts_B1,
        query_offsets_B,
        kv_lens_B,
        kv_starts_B,
        pieces_I,
        out_THV,
        lse_TH,
        scale * log2(e),
        num_pieces,
        num_sequences,
        num_heads,
        *q_THC.stride()[:2],
        k_ratio,
        v_ratio,
        rest_ratio,
        k_cache_NPGC.stride(2),
        v_cache_NPGV.stride(2),
        block_tables_BM.stride(0),
        GROUP=group,
        PACK=pack,
        PAGE=page_size,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        WINDOW=window,
        REST=0 if k_rest_NPR is None else k_rest_NPR.shape[2] // 64,
        BLOCK_N=block_n,
        BUFFERS=2 if width <= 128 else 1,  # of queries, as shared memory allows
        num_warps=4,
        **dependent_launch(q_THC),
    )
