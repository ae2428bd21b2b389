"""Decode attention of few rows that takes along their norms and rotation, and the store of their keys and values, for
compute capability 9 (H100, H200): one round of loads between what the launch before has written and the products.

Knows pages, lengths and heads; attention_decode.py, whose `new` it takes, and qk_rope_store.py define it: same
operations in the same layouts, so the same bits. Older keys and values are older than the launch before, and lie in
shared memory before its end. Behind it queries, the new key, both with their pairs' other halves, and the new value are
asked for at once; the key is one more row of the queries' tile, so that its norm and turn cost nothing of their own.

One H200, microseconds, here / where a kernel in Triton first turned its queries, then stored the key and then copied:
32 heads over 4, 1 row of 577 keys 4.7 / 6.7, of 641 4.5 / 6.9, of 4000 11.0 / 13.7; 4 rows of up to 900 keys, window
300, 7 heads over 1, 4.1 / 6.6. With a launch for norm, turn and store: see FEW_PROGRAMS in decode_cut.py.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.decode_cut import FEW_PROGRAMS, most_parts
from kernels.dependent_launch import AHEAD_ROWS, dependent_launch, wait_for_inputs
from kernels.kv_int4 import Int4Scales
from kernels.kv_quantize import KVScales
from kernels.new_rows import NewRows
from kernels.rmsnorm import rms_apply as _rms_apply
from kernels.rope import rotate as _rotate
from kernels.split_kv import SplitRule
from kernels.split_runs import Parts, merge_runs
from kernels.split_runs import splits_of as _splits_of
from kernels.tiles import device_generation
from kernels.turn_heads import other_column as _other_column

_WIDTH = gl.constexpr(128)
"""Of a head: how its row is spread over threads below is what norm_tile makes of this width."""

_TILE = gl.constexpr(64)
"""Keys, as in decode_cut.py."""

_STAGES = 3
"""Tiles in shared memory, 32 KiB each: splits of up to 1024 keys have two."""

rms_apply = gluon.jit(_rms_apply.fn)
rotate = gluon.jit(_rotate.fn)
splits_of = gluon.jit(_splits_of.fn)
other_column = gluon.jit(_other_column.fn)


@gluon.jit
def _ask(
    k_ptr, v_ptr, table_ptr, start, first, end, ks, vs, stride_kn, stride_kp, stride_vn, stride_vp, PAGE: gl.constexpr
):  # fmt: skip
    """Begin to copy a tile's keys and values; in place of those outside [first, end) the nearest inside comes again."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    c = gl.arange(0, _WIDTH, gl.SliceLayout(0, COPY))[None, :]
    key = gl.minimum(gl.maximum(start + gl.arange(0, _TILE, gl.SliceLayout(1, COPY)), first), end - 1)
    block, in_page = gl.load(table_ptr + key // PAGE).to(gl.int64), key % PAGE
    async_copy.async_copy_global_to_shared(ks, k_ptr + (block * stride_kn + in_page * stride_kp)[:, None] + c)
    async_copy.async_copy_global_to_shared(vs, v_ptr + (block * stride_vn + in_page * stride_vp)[:, None] + c)


@gluon.jit
def _weights_of(c, other, q_weight_ptr, k_weight_ptr, is_key):
    """The norm's weights of columns c and of the others of their pairs, of the key's row and of the queries'."""
    weight = gl.where(is_key, gl.load(k_weight_ptr + c)[None, :], gl.load(q_weight_ptr + c)[None, :])
    other_weight = gl.where(is_key, gl.load(k_weight_ptr + other)[None, :], gl.load(q_weight_ptr + other)[None, :])
    return weight, other_weight


# The partial result of each split, as kernels/attention_decode.py has it without scales; a sequence of one is done then
#   q_ptr [B, H, C], k_ptr, v_ptr [N, P, G, C], new_k_ptr, new_v_ptr [B, G, C], of one dtype, any strides but the last;
#   q_weight_ptr, k_weight_ptr [C] or None; angles_ptr fp32 [P, 2 * HALF]; int64 [B]: positions_ptr, slots_ptr, where -1
#   stores nothing; int32: tables_ptr [B, M], kv_lens_ptr [B]; out_ptr [B, H, C], acc_ptr fp32 [B, S, H, C] and sums_ptr
#   fp32 [2, B, S, H], contiguous
#   grid (G, S, B): a program owns one split of one kv head, with all its query heads as rows of one tile. Row GROUP of
#   that tile is the new key: it is normalised and turned with them, and stored by the program of the last split. No
#   copy waits for it: its scores are those of its own row of the tile, and its value is put in its place where the sum
#   reads it; what the cache holds there is not looked at.
#   fp32 accumulation. Rows behind it are zero, not written. Tiles stand at multiples of 64; keys outside [first, end)
#   are not read (the nearest key inside stands in) and weigh 0. A program without keys ends.


@gluon.jit(do_not_specialize=["stride_tb", "stride_sum"])
def _decode_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    kv_lens_ptr,
    out_ptr,
    acc_ptr,
    sums_ptr,
    new_k_ptr,
    new_v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    angles_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    scale_log2,
    num_heads,
    stride_qb,
    stride_qh,
    stride_nkb,
    stride_nkg,
    stride_nvb,
    stride_nvg,
    stride_kn,
    stride_kp,
    stride_kg,
    stride_vn,
    stride_vp,
    stride_vg,
    stride_tb,
    stride_sum,
    GROUP: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    FEW_SPLITS: gl.constexpr,
    HALF: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    kv_head, split, sequence = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.program_id(2).to(gl.int64)
    kv_len = gl.load(kv_lens_ptr + sequence)
    seen, origin, split_len, splits = splits_of(kv_len, SPLIT_LEN, FEW_SPLITS, WINDOW)
    if (split >= splits) & (split > 0):
        wait_for_inputs(PDL)
        return
    first = gl.maximum(origin + split * split_len, seen)
    end = gl.minimum(origin + (split + 1) * split_len, kv_len)
    begin = first // _TILE * _TILE
    table_ptr = tables_ptr + sequence * stride_tb
    k_ptr += kv_head * stride_kg
    v_ptr += kv_head * stride_vg
    queries = gl.allocate_shared_memory(dtype, [16, _WIDTH], SWIZZLED)
    ks = gl.allocate_shared_memory(dtype, [STAGES, _TILE, _WIDTH], SWIZZLED)
    vs = gl.allocate_shared_memory(dtype, [STAGES, _TILE, _WIDTH], SWIZZLED)
    for t in gl.static_range(STAGES):
        if begin + t * _TILE < end:
            _ask(
                k_ptr, v_ptr, table_ptr, begin + t * _TILE, first, end, ks.index(t), vs.index(t), stride_kn, stride_kp,
                stride_vn, stride_vp, PAGE,
            )  # fmt: skip
        async_copy.commit_group()
    position, slot = gl.load(positions_ptr + sequence), gl.load(slots_ptr + sequence)
    row, c = gl.arange(0, 16, gl.SliceLayout(1, ROWS)), gl.arange(0, _WIDTH, gl.SliceLayout(0, ROWS))
    is_query, is_key = (row < GROUP)[:, None], (row == GROUP)[:, None]
    is_second, pair, other = other_column(c, HALF, INTERLEAVED)
    in_turn = (c < 2 * HALF)[None, :]
    angle_ptr = angles_ptr + position * (2 * HALF) + pair
    cos = gl.load(angle_ptr, mask=c < 2 * HALF, other=0.0)[None, :]
    sin = gl.load(angle_ptr + HALF, mask=c < 2 * HALF, other=0.0)[None, :]
    if q_weight_ptr is not None:
        weight, other_weight = _weights_of(c, other, q_weight_ptr, k_weight_ptr, is_key)
    stores = (split + 1 >= splits) & (slot >= 0)
    newest = gl.where(stores, kv_len - 1, 0x7FFFFFFF)
    place = slot // PAGE * stride_kn + slot % PAGE * stride_kp
    value_place = slot // PAGE * stride_vn + slot % PAGE * stride_vp
    q_row_ptr = q_ptr + sequence * stride_qb + (kv_head * GROUP + row)[:, None] * stride_qh
    k_row_ptr = new_k_ptr + sequence * stride_nkb + kv_head * stride_nkg + row[:, None] * 0
    v_row_ptr = new_v_ptr + sequence * stride_nvb + kv_head * stride_nvg
    wait_for_inputs(PDL)  # lengths, tables and older keys are older than the launch before
    x = gl.load(q_row_ptr + c[None, :], mask=is_query, other=0.0)
    y = gl.load(q_row_ptr + other[None, :], mask=is_query, other=0.0)
    k_x = gl.load(k_row_ptr + c[None, :], mask=is_key & stores, other=0.0)
    k_y = gl.load(k_row_ptr + other[None, :], mask=is_key & stores, other=0.0)
    cv = gl.arange(0, _WIDTH, gl.SliceLayout(0, RIGHT))
    new_value = gl.load(v_row_ptr + cv, mask=stores & (cv >= 0), other=0.0)
    x, y = gl.where(is_key, k_x, x), gl.where(is_key, k_y, y)
    if q_weight_ptr is not None:
        wide = x.to(gl.float32)
        mean = gl.sum(wide * wide, axis=1)[:, None] / _WIDTH
        scale = gl.div_rn(1.0, gl.sqrt_rn(mean + eps))
        x, y = rms_apply(x, scale, weight), rms_apply(y, scale, other_weight)
    second_here = is_second[None, :]
    turned, turned_second = rotate(gl.where(second_here, y, x), gl.where(second_here, x, y), cos, sin)
    x = gl.where(in_turn, gl.where(second_here, turned_second, turned), x)
    queries.store(x)
    gl.store(k_ptr + place + row[:, None] * 0 + c[None, :], x, mask=is_key & stores)
    gl.store(v_ptr + value_place + cv, new_value, mask=stores & (cv >= 0))
    q = queries.load(LEFT)
    own = queries.slice(GROUP // 8 * 8, 8, dim=0).permute((1, 0))
    own_here = (gl.arange(0, 8, COLUMN) == GROUP % 8)[None, :]
    maximum = gl.full([16], float("-inf"), gl.float32, ROW)
    total = gl.zeros([16], gl.float32, ROW)
    acc = gl.zeros([16, _WIDTH], gl.float32, MMA)
    for start in range(begin, end, _TILE):
        stage = (start - begin) // _TILE % STAGES
        async_copy.wait_group(STAGES - 1)
        k = ks.index(stage).permute((1, 0)).load(RIGHT)
        scores = mma_v2(q, k, gl.zeros([16, _TILE], gl.float32, MMA)) * scale_log2
        v = vs.index(stage).load(RIGHT)
        key = start + gl.arange(0, _TILE, COLUMN)
        if start + _TILE > newest:
            own_score = mma_v2(q, own.load(RIGHT), gl.zeros([16, 8], gl.float32, MMA)) * scale_log2
            own_score = gl.sum(gl.where(own_here, own_score, 0.0), axis=1)
            scores = gl.where((key == newest)[None, :], own_score[:, None], scores)
            # Wherever the newest key's place in the cache was copied: also where it stands in, and weighs 0, behind it
            # and, if it is the first that counts (a window of 1), before it.
            source = gl.maximum(start + gl.arange(0, _TILE, gl.SliceLayout(1, RIGHT)), first)
            v = gl.where((source >= newest)[:, None], new_value[None, :], v)
        scores = gl.where(((key >= first) & (key < end))[None, :], scores, float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(scores, axis=1))
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = gl.exp2(scores - base[:, None])
        decay = gl.exp2(maximum - base)
        p = gl.convert_layout(weights.to(dtype), LEFT)
        acc = mma_v2(p, v, acc * decay[:, None])
        # Behind the products, on whose way nothing waits for it.
        total = total * decay + gl.sum(weights, axis=1)
        maximum = new_maximum
        if start + STAGES * _TILE < end:
            _ask(
                k_ptr, v_ptr, table_ptr, start + STAGES * _TILE, first, end, ks.index(stage), vs.index(stage),
                stride_kn, stride_kp, stride_vn, stride_vp, PAGE,
            )  # fmt: skip
        async_copy.commit_group()
    head = gl.arange(0, 16, ROW)
    real = head < GROUP
    head = kv_head * GROUP + head
    column = gl.arange(0, _WIDTH, COLUMN)
    inside = real[:, None] & (column >= 0)[None, :]
    if splits > 1:
        part = (sequence * gl.num_programs(1) + split) * num_heads + head
        gl.store(sums_ptr + part, maximum, mask=real)
        gl.store(sums_ptr + stride_sum + part, total, mask=real)
        gl.store(acc_ptr + part[:, None] * _WIDTH + column[None, :], acc, mask=inside)
    else:
        out = acc / gl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = out_ptr + (sequence * num_heads + head)[:, None] * _WIDTH + column[None, :]
        gl.store(out_ptrs, out.to(dtype), mask=inside)


def stores_new(
    q_BHC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGC: Tensor, scales: KVScales | Int4Scales | None, new: NewRows
) -> bool:
    """Whether `attention_decode` takes `new`: of few programs, in a cache of the model's dtype, 16 bits; heads of 128,
    a row to spare in the tile of a kv head's queries, and copies of 16 bytes. Else `qk_rope_store` comes first."""
    (num_sequences, num_heads, width), num_kv_heads = q_BHC.shape, k_cache_NPGC.shape[2]
    rows, caches = (q_BHC, new.k_BGC, new.v_BGC), (k_cache_NPGC, v_cache_NPGC)
    return (
        scales is None
        and device_generation(q_BHC) == 9
        and q_BHC.dtype in (torch.bfloat16, torch.float16)
        and k_cache_NPGC.dtype == v_cache_NPGC.dtype == q_BHC.dtype
        and 0 < num_sequences * num_kv_heads <= FEW_PROGRAMS
        and width == _WIDTH.value
        and num_heads // num_kv_heads < 16
        and all(stride % 16 == 0 for x in rows for stride in x.stride()[:2])
        and all(stride % 16 == 0 for x in caches for stride in x.stride()[:3])
        and all(x.data_ptr() % 16 == 0 for x in (*rows, *caches))
    )


def attention_decode_rows(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGC: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    new: NewRows,
    rule: SplitRule,
    *,
    scale: float,
    window: int,
    max_kv_len: int,
) -> Tensor:
    """out_BHC as two launches, or as one where no sequence has more than one split; keys and values of `new` are in the
    cache then. Operands are checked by the caller, and not empty."""
    assert stores_new(q_BHC, k_cache_NPGC, v_cache_NPGC, None, new), "not for these rows: store them first"
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads = k_cache_NPGC.shape[2]
    number = most_parts(max_kv_len, window, rule, whole=False)
    out_BHC = q_BHC.new_empty(num_sequences, num_heads, width)
    parts = Parts.of(num_sequences, number, num_heads, width, q_BHC.device)
    k_BGC, v_BGC, norms, rope, slots_B = new
    q_C, k_C, eps = norms or (None, None, 0.0)
    _decode_rows_kernel[(num_kv_heads, number, num_sequences)](
        q_BHC,
        k_cache_NPGC,
        v_cache_NPGC,
        block_tables_BM,
        kv_lens_B,
        out_BHC,
        *parts,
        k_BGC,
        v_BGC,
        q_C,
        k_C,
        rope.cos_sin_PR,
        rope.positions_T,
        slots_B,
        eps,
        scale * log2(e),
        num_heads,
        *q_BHC.stride()[:2],
        *k_BGC.stride()[:2],
        *v_BGC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGC.stride()[:3],
        block_tables_BM.stride(0),
        parts.sums_2BPH.stride(0),
        GROUP=num_heads // num_kv_heads,
        PAGE=k_cache_NPGC.shape[1],
        WINDOW=window,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        HALF=rope.cos_sin_PR.shape[1] // 2,
        INTERLEAVED=rope.interleaved,
        STAGES=_STAGES,
        num_warps=4,
        **dependent_launch(q_BHC, ahead=num_sequences <= AHEAD_ROWS),
    )
    if number > 1:
        merge_runs(parts, kv_lens_B, out_BHC, rule, window=window, whole=False)
    return out_BHC
