"""MLA decode on Hopper: against fp64, the same bits in any company, and what it leaves to the other kernel."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from kernels.mla_decode import mla_decode, mla_decode_reference
from kernels.mla_decode_hopper import attend_splits, list_rule, runs_on_hopper
from kernels.mla_few_heads import few_heads_kernel
from kernels.mla_many_heads import many_heads_kernel
from kernels.mla_merge import Splits, _merge_kernel, merge_parts
from kernels.mla_order import list_pieces
from kernels.split_kv import SplitRule
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.gluon_aot import box, compile_gluon_ahead
from tests.paged_cache import assert_accurate, dense_attention, draw, index, paged_cache

HEADS = [1, 16, 27, 64, 123, 128]  # up to 32 keys are rows, above heads are: one and two tiles, whole and not
LENS = [1, 64, 100, 0, 257, 1025, 2000, 4097]  # around a tile of 64, splits of 128, 256, 512 and more


def draw_case(heads, page, lens, dtype=torch.bfloat16):
    """The cache as the engine lays it out, [N, P, 576]; NaN behind every sequence, wild ids behind every last page."""
    cache = paged_cache(lens, page=page, width=576, dtype=dtype, device="cuda")
    q_BHX = draw(len(lens), heads, 576, dtype=dtype, device="cuda", seed=7)
    cache_NPX = cache.k_cache_NPGC[:, :, 0].contiguous()
    assert runs_on_hopper(q_BHX[..., :512], q_BHX[..., 512:], cache_NPX)
    return q_BHX, cache_NPX, cache


def run(attend, q_BHX, cache_NPX, cache, max_kv_len=None, rows: slice | list[int] = slice(None)):
    return attend(
        q_BHX[rows, :, :512],
        q_BHX[rows, :, 512:],
        cache_NPX,
        cache.block_tables_BM[rows],
        cache.kv_lens_B[rows],
        scale=0.05,
        max_kv_len=int(cache.kv_lens_B[rows].max()) if max_kv_len is None else max_kv_len,
    )


def exact(q_BHX, cache, dtype=torch.float64):
    rows = [
        dense_attention(q[None], x, x[..., :512], scale=0.05, query_offset=x.shape[0] - 1, dtype=dtype)[0]
        for q, x in zip(q_BHX, cache.keys)
    ]
    return torch.cat(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_kernel(heads, page, dtype):
    q_BHX, cache_NPX, cache = draw_case(heads, page, LENS, dtype)
    ours = run(mla_decode, q_BHX, cache_NPX, cache)
    assert_accurate(ours, exact(q_BHX, cache, dtype), exact(q_BHX, cache))
    assert bool((ours[LENS.index(0)] == 0).all())
    assert max_rel(ours, run(mla_decode_reference, q_BHX, cache_NPX, cache)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("others", [64, 600])  # runs shorter than a sequence, and of several: merged in two places
def test_a_row_has_the_same_bits_in_any_company(heads, others):
    lens = [1 + 37 * b % 1500 for b in range(others)] + LENS
    q_BHX, cache_NPX, cache = draw_case(heads, 64, lens)
    together = run(mla_decode, q_BHX, cache_NPX, cache)
    assert_same_bits(run(mla_decode, q_BHX, cache_NPX, cache, max_kv_len=32768), together)
    backwards = list(range(len(lens)))[::-1]
    assert_same_bits(run(mla_decode, q_BHX, cache_NPX, cache, rows=backwards)[backwards], together)
    for b in [*range(0, others, others // 64), *range(others, len(lens))]:
        alone = run(mla_decode, q_BHX, cache_NPX, cache, rows=slice(b, b + 1), max_kv_len=4200)
        assert_same_bits(alone, together[b : b + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_batches_around_the_number_of_programs(heads):
    """Sequences of one length: of as many as there are programs each has one, of one more some are cut."""
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    q_BHX, cache_NPX, cache = draw_case(heads, 16, [300] * (2 * programs + 1))
    together = run(mla_decode, q_BHX, cache_NPX, cache)
    assert_accurate(together, exact(q_BHX, cache, torch.bfloat16), exact(q_BHX, cache))
    for count in (1, 2, programs // 2, programs - 1, programs, programs + 1, 2 * programs):
        assert_same_bits(run(mla_decode, q_BHX, cache_NPX, cache, rows=slice(count)), together[:count])


@pytest.mark.gpu
def test_sequences_of_one_length_are_dealt_out_whole():
    """Two for each program or a few less: nothing is left to merge. Of ten more some are cut."""
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    q_BHX, cache_NPX, cache = draw_case(16, 16, [300] * (2 * programs + 10))
    for count, cut in ((2 * programs - 8, False), (2 * programs, False), (2 * programs + 10, True)):
        operands = (q_BHX[:count, :, :512], q_BHX[:count, :, 512:], cache_NPX)
        splits = attend_splits(
            *operands, cache.block_tables_BM[:count], cache.kv_lens_B[:count], scale=0.05, max_kv_len=300
        )
        assert splits.whole_B is not None and bool((splits.whole_B == 0).any()) == cut, count


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_only_empty_sequences_and_many_of_them(heads):
    lens = [0] * 700 + [70] + [0] * 300
    q_BHX, cache_NPX, cache = draw_case(heads, 64, lens)
    ours = run(mla_decode, q_BHX, cache_NPX, cache)
    assert bool((ours[[b for b, n in enumerate(lens) if n == 0]] == 0).all())
    assert_same_bits(ours[700:701], run(mla_decode, q_BHX, cache_NPX, cache, rows=slice(700, 701)))
    assert bool((run(mla_decode, q_BHX, cache_NPX, cache, rows=slice(700), max_kv_len=64) == 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 123])
@pytest.mark.parametrize("others", [0, 3, 300])  # fewer pieces than programs: the rest count in vain; many more
def test_a_list_given_serves_every_layer(heads, others):
    """Read ahead of the launch before it, and left with its counter at zero, also by replays of a graph."""
    lens = [1 + 613 * b % 5000 for b in range(others)] + LENS
    q_BHX, cache_NPX, cache = draw_case(heads, 64, lens)
    rule = list_rule(q_BHX[..., :512], q_BHX[..., 512:], cache_NPX)
    assert rule is not None
    alone = run(mla_decode, q_BHX, cache_NPX, cache, max_kv_len=8192)
    pieces = list_pieces(cache.kv_lens_B, rule, max_kv_len=8192)
    layers = partial(run, partial(mla_decode, pieces=pieces), q_BHX, cache_NPX, cache, max_kv_len=8192)
    torch.cuda.synchronize()
    for _ in range(3):
        assert_same_bits(layers(), alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layers() for _ in range(3)]
    for _ in range(3):
        for out in outs:
            out.zero_()
        graph.replay()
        for out in outs:
            assert_same_bits(out, alone)
    assert int(pieces.counts[1]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_nan_latent_of_one_sequence_stays_with_it(heads):
    q_BHX, cache_NPX, cache = draw_case(heads, 64, [200, 200, 200])
    clean = run(mla_decode, q_BHX, cache_NPX, cache)
    cache_NPX[cache.block_tables_BM[1, 0].long(), 3] = torch.nan
    poisoned = run(mla_decode, q_BHX, cache_NPX, cache)
    assert poisoned[1].isnan().all()
    assert_same_bits(poisoned[[0, 2]], clean[[0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_C16_last_block_of_a_cache_above_two_to_the_31(heads):
    page = 64
    num_blocks = 2**31 // (page * 576) + 2
    cache_NPX = torch.full((num_blocks, page, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache_NPX[-1] = draw(page, 576, dtype=torch.bfloat16, device="cuda")
    q_BHX = draw(1, heads, 576, dtype=torch.bfloat16, device="cuda", seed=1)
    table_BM, lens = index([num_blocks - 1], "cuda").view(1, 1), index([page], "cuda")
    out = mla_decode(q_BHX[..., :512], q_BHX[..., 512:], cache_NPX, table_BM, lens, scale=0.05, max_kv_len=page)
    rows = cache_NPX[-1, :, None]
    assert max_rel(out, dense_attention(q_BHX, rows, rows[..., :512], scale=0.05, query_offset=page - 1)[0]) < 2e-2


def test_a_cpu_is_left_to_the_other_kernel():
    q_BHX = draw(1, 128, 576)
    operands = (q_BHX[..., :512], q_BHX[..., 512:], draw(4, 64, 576))
    assert not runs_on_hopper(*operands) and list_rule(*operands) is None


def operand_types(page):
    """Of what both kernels take."""
    types = {"desc": box("bf16", min(page, 64), 64), "tables_ptr": "*i32", "out_ptr": "*bf16", "parts_ptr": "*fp16"}
    types |= {"lse_ptr": "*fp32", "scale_log2": "fp32", "PAGE": page}
    return types | dict.fromkeys(("num_splits", "num_heads", "stride_tb"), "i32")


@aot
@pytest.mark.parametrize(
    ("block_h", "page"),
    [
        (16, 16),  # four pages a tile; merges in registers
        (16, 32),
        (32, 64),
    ],
)
def test_few_heads_compile_ahead_of_time(block_h, page):
    args = operand_types(page) | dict.fromkeys(("q_latent_ptr", "q_pe_ptr"), "*bf16")
    args |= dict.fromkeys(("kv_lens_ptr", "whole_ptr"), "*i32")
    args |= dict.fromkeys(("num_sequences", "stride_lb", "stride_lh", "stride_rb", "stride_rh"), "i32")
    sizes = {"SPLIT_LEN": 128, "FEW_SPLITS": 8, "BLOCK_H": block_h, "PDL": True}
    compile_gluon_ahead(few_heads_kernel, args | sizes)


@aot
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("pdl", [True, False])  # False: the list is made right before
def test_many_heads_compile_ahead_of_time(page, pdl):
    args = operand_types(page) | dict.fromkeys(("latent_desc", "pe_desc"), box("bf16", 1, 64, 64))
    compile_gluon_ahead(many_heads_kernel, args | dict.fromkeys(("pieces_ptr", "counts_ptr"), "*i32") | {"PDL": pdl})


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_merge_compiles_ahead_of_time(arch):
    pointers = {
        "parts_ptr": "*fp16",
        "lse_ptr": "*fp32",
        "kv_lens_ptr": "*i32",
        "whole_ptr": "*i32",
        "out_ptr": "*bf16",
    }
    sizes = {"VALUE_WIDTH": 512, "BLOCK_V": 128, "BLOCK_H": 8, "CHUNK": 8, "SPLIT_LEN": 128, "FEW_SPLITS": 8}
    pdl = {"PDL": "ahead" if arch >= 90 else False}
    compile_ahead(_merge_kernel, arch, {**pointers, "num_splits": "i32", "num_heads": "i32", **sizes, **pdl})


@pytest.mark.parametrize("whole", [None, [0, 1, 0, 0, 0]])
def test_merge(backend, whole):
    """Sequences of none, eight, one, five and two splits, NaN where nothing was written, one that is whole already."""
    rule, heads, width = SplitRule(128, few=8), 3, 32
    lens = [0, 1000, 128, 600, 129]
    splits = rule.most(max(lens))
    parts_BSHV = draw(len(lens), splits, heads, width, dtype=backend.dtype, device=backend.device)
    lse_BSH = draw(len(lens), splits, heads, device=backend.device, seed=1) * 5
    for b, n in enumerate(lens):
        parts_BSHV[b, -(-n // 128) :], lse_BSH[b, -(-n // 128) :] = torch.nan, torch.nan
    out_BHV = torch.full((len(lens), heads, width), 7.0, dtype=backend.dtype, device=backend.device)
    whole_B = None if whole is None else index(whole, backend.device)
    merge_parts(Splits(parts_BSHV, lse_BSH, whole_B, out_BHV, rule), index(lens, backend.device))
    for b, n in enumerate(lens):
        count = -(-n // 128)
        if count <= 1 or (whole is not None and whole[b]):
            assert bool((out_BHV[b] == 7.0).all())
            continue
        weights_SH1 = torch.softmax(lse_BSH[b, :count].double() * math.log(2), dim=0)[..., None]
        assert max_rel(out_BHV[b], (parts_BSHV[b, :count].double() * weights_SH1).sum(0)) < 1e-2
