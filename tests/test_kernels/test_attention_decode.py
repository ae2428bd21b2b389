"""Decode attention: against fp64, against the reference, and the same bits in any company."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.attention_decode import (
    _decode_kernel,
    attention_decode,
    attention_decode_reference,
    attention_decode_triton,
)
from kernels.split_kv import MAX_SPLITS, SplitRule, _merge_splits_kernel
from kernels.split_runs import _merge_runs_kernel
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.paged_cache import assert_accurate, dense_attention, draw, index, paged_cache

SHAPES = [
    # page, heads, kv heads, width, value width, window, lens
    pytest.param(16, 4, 4, 32, 32, 0, [1, 0, 127, 128, 129], id="group1-around-a-tile"),
    pytest.param(17, 6, 2, 40, 40, 0, [3, 255, 257], id="group3-odd-page-around-a-split"),
    pytest.param(64, 7, 1, 96, 24, 0, [65, 0], id="group7-narrow-values"),
    pytest.param(1, 2, 1, 16, 16, 0, [9, 1], id="page1"),
    pytest.param(16, 2, 2, 32, 32, 1, [1, 130, 0], id="window-of-one"),
    pytest.param(16, 2, 1, 32, 32, 20, [5, 20, 21, 300], id="window-across-splits"),
    pytest.param(16, 2, 1, 32, 32, 4096, [5, 129], id="window-above-every-length"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def exact(q_BHC, cache, window, dtype=torch.float64):
    """Sequence by sequence, by whole matrices."""
    scale = q_BHC.shape[2] ** -0.5
    rows = [
        dense_attention(q[None], k, v, scale=scale, query_offset=k.shape[0] - 1, window=window, dtype=dtype)[0]
        for q, k, v in zip(q_BHC, cache.keys, cache.values)
    ]
    return torch.cat(rows)


def run(attend, q_BHC, cache, window, max_kv_len=None, rows=slice(None)):
    return attend(
        q_BHC[rows],
        cache.k_cache_NPGC,
        cache.v_cache_NPGV,
        cache.block_tables_BM[rows],
        cache.kv_lens_B[rows],
        scale=q_BHC.shape[2] ** -0.5,
        window=window,
        max_kv_len=int(cache.kv_lens_B[rows].max()) if max_kv_len is None else max_kv_len,
    )


def draw_case(page, heads, kv_heads, width, value_width, lens, dtype, device):
    sizes = {"page": page, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    cache = paged_cache(lens, **sizes, dtype=dtype, device=device)
    # Queries are a slice of wider rows, as the projection leaves them.
    return draw(len(lens), heads + 2, width, dtype=dtype, device=device, seed=7)[:, :heads], cache


@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "value_width", "window", "lens"), SHAPES)
def test_kernel(backend, page, heads, kv_heads, width, value_width, window, lens):
    q_BHC, cache = draw_case(page, heads, kv_heads, width, value_width, lens, backend.dtype, backend.device)
    ours = run(attention_decode_triton, q_BHC, cache, window)
    assert ours.dtype == backend.dtype
    assert_accurate(ours, exact(q_BHC, cache, window, backend.dtype), exact(q_BHC, cache, window))
    assert max_rel(ours, run(attention_decode_reference, q_BHC, cache, window)) < TOLERANCE[backend.dtype]


@pytest.mark.parametrize("attend", [attention_decode, attention_decode_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page", "heads", "kv_heads", "width", "value_width", "window", "lens"), SHAPES)
def test_reference(attend, dtype, page, heads, kv_heads, width, value_width, window, lens):
    q_BHC, cache = draw_case(page, heads, kv_heads, width, value_width, lens, dtype, "cpu")
    ours = run(attend, q_BHC, cache, window)
    assert_accurate(ours, exact(q_BHC, cache, window, dtype), exact(q_BHC, cache, window))


def check_company(attend, lens, heads, kv_heads, width, window, dtype, device):
    """A row alone, in a batch, in a batch of another order, and under another bound has the same bits."""
    q_BHC, cache = draw_case(16, heads, kv_heads, width, width, lens, dtype, device)
    together = run(attend, q_BHC, cache, window)
    assert not together.isnan().any()
    assert_same_bits(run(attend, q_BHC, cache, window, max_kv_len=8192), together)
    backwards = list(range(len(lens)))[::-1]
    assert_same_bits(run(attend, q_BHC, cache, window, rows=backwards)[backwards], together)
    for b in range(len(lens)):
        assert_same_bits(run(attend, q_BHC, cache, window, rows=slice(b, b + 1)), together[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 8, 32), (6, 2, 40), (7, 1, 24)])
def test_reference_gives_a_row_the_same_bits_in_any_company(dtype, window, heads, kv_heads, width):
    check_company(attention_decode, [1, 40, 127, 128, 129, 300, 17], heads, kv_heads, width, window, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])
def test_kernel_gives_a_row_the_same_bits_in_any_company(window):
    lens = [1 + 37 * b % 1500 for b in range(64)]
    check_company(attention_decode, lens, 32, 4, 128, window, torch.bfloat16, "cuda")


@pytest.mark.parametrize(("window", "lens"), [(0, [0, 65, 512, 513]), (530, [580])])
def test_bits_are_those_of_any_cut_into_programs(backend, window, lens):
    """A run in one program, or its splits in many, and around each number of splits and runs."""
    q_BHC, cache = draw_case(64, 2, 1, 16, 16, lens, backend.dtype, backend.device)

    def attend(whole):
        return run(partial(attention_decode_triton, whole=whole, rule=SplitRule(64, few=16)), q_BHC, cache, window)

    ours = attend(False)
    assert_same_bits(attend(True), ours)
    assert_accurate(ours, exact(q_BHC, cache, window, backend.dtype), exact(q_BHC, cache, window))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 4), (32, 8), (14, 2)])
def test_bits_of_many_sequences_are_those_of_any_cut_into_programs(heads):
    lens = [1 + 61 * b % 9000 for b in range(300)]
    q_BHC, cache = draw_case(16, *heads, 128, 128, lens, torch.bfloat16, "cuda")
    ours = run(partial(attention_decode_triton, whole=False), q_BHC, cache, 0)
    assert_accurate(ours, exact(q_BHC, cache, 0, torch.bfloat16), exact(q_BHC, cache, 0))
    assert_same_bits(run(partial(attention_decode_triton, whole=True), q_BHC, cache, 0), ours)


def test_no_sequences_and_no_keys(backend):
    q_BHC, cache = draw_case(16, 2, 1, 16, 16, [0, 0], backend.dtype, backend.device)
    assert_same_bits(run(attention_decode_triton, q_BHC, cache, 0, max_kv_len=0), torch.zeros_like(q_BHC))
    assert_same_bits(run(attention_decode_triton, q_BHC, cache, 0, max_kv_len=400), torch.zeros_like(q_BHC))
    none = run(attention_decode_triton, q_BHC, cache, 0, max_kv_len=400, rows=slice(0, 0))
    assert none.shape == (0, 2, 16)


def test_a_nan_key_of_one_sequence_stays_with_it(backend):
    """The result of that sequence is NaN (the logits' check finds it), the others' are untouched."""
    q_BHC, cache = draw_case(16, 2, 1, 16, 16, [20, 20, 20], backend.dtype, backend.device)
    clean = run(attention_decode_triton, q_BHC, cache, 0)
    cache.k_cache_NPGC[cache.block_tables_BM[1, 0], 3] = torch.nan
    for attend in (attention_decode_triton, attention_decode_reference):
        poisoned = run(attend, q_BHC, cache, 0)
        assert poisoned[1].isnan().all() and not poisoned[[0, 2]].isnan().any()
    assert_same_bits(run(attention_decode_triton, q_BHC, cache, 0)[[0, 2]], clean[[0, 2]])


def splits_of(rule, kv_len):
    """In plain numbers what the kernels do: 1, 2 or 4 times the length, then whole multiples of 4 times it."""
    for factor in (1, 2):
        if kv_len <= factor * rule.few * rule.length:
            return -(-kv_len // (factor * rule.length))
    unit = 4 * rule.length
    return -(-kv_len // (-(-kv_len // (unit * MAX_SPLITS.value)) * unit))


@pytest.mark.parametrize("rule", [SplitRule(128, few=8), SplitRule(512, few=4)])
def test_splits_of_any_length_lie_inside_the_grid_of_any_longer_bound(rule):
    bounds = [1, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 4096, 8192, 32768, 131072, 131073]
    for bound in bounds:
        most = rule.most(bound)
        assert most <= MAX_SPLITS.value
        assert all(splits_of(rule, kv_len) <= most for kv_len in range(1, bound + 1, 61)), bound
        assert splits_of(rule, bound) <= most


@pytest.mark.gpu
def test_very_long_sequence():
    """Above 64 splits of 256 keys, where splits grow."""
    q_BHC, cache = draw_case(16, 8, 1, 128, 128, [40_000, 7], torch.bfloat16, "cuda")
    ours = run(attention_decode, q_BHC, cache, 0)
    assert_accurate(ours, exact(q_BHC, cache, 0, torch.bfloat16), exact(q_BHC, cache, 0))


@pytest.mark.gpu
def test_C16_last_block_of_a_cache_above_two_to_the_31():
    page, heads, width = 16, 8, 128
    num_blocks = 2**31 // (2 * page * heads * width) + 2
    cache = torch.full((num_blocks, 2, page, heads, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache[-1] = draw(2, page, heads, width, dtype=torch.bfloat16, device="cuda")
    q_BHC = draw(1, 32, width, dtype=torch.bfloat16, device="cuda", seed=1)
    lens = index([page], "cuda")
    for blocks in (cache, cache[-1:].clone()):
        table_BM = index([blocks.shape[0] - 1], "cuda").view(1, 1)
        out = attention_decode(q_BHC, blocks[:, 0], blocks[:, 1], table_BM, lens, scale=0.1, max_kv_len=page)
        wanted = dense_attention(q_BHC, cache[-1, 0], cache[-1, 1], scale=0.1, query_offset=page - 1)[0]
        assert max_rel(out, wanted) < TOLERANCE[torch.bfloat16]


@aot
@pytest.mark.parametrize(
    ("arch", "dtype", "width", "block_n", "num_stages", "cached", "whole"),
    [
        *((arch, "bf16", 128, 64, 3, "bf16", whole) for arch in ARCHS for whole in (False, True)),
        *((arch, dtype, 128, 64, 3, "fp8e4nv", True) for arch in ARCHS if arch >= 89 for dtype in ("bf16", "fp16")),
        (80, "fp16", 96, 64, 3, "fp16", False),
        (80, "fp32", 128, 32, 1, "fp32", False),
        (90, "fp32", 128, 32, 1, "fp8e4nv", True),
    ],
)
def test_kernel_compiles_ahead_of_time(arch, dtype, width, block_n, num_stages, cached, whole):
    pointers = {"q_ptr": f"*{dtype}", "k_ptr": f"*{cached}", "v_ptr": f"*{cached}", "tables_ptr": "*i32"}
    pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), None if cached == dtype else "*fp32")
    pointers |= {"kv_lens_ptr": "*i32", "out_ptr": f"*{dtype}", "acc_ptr": "*fp32", "sums_ptr": "*fp32"}
    numbers = {"scale_log2": "fp32", "num_heads": "i32"}
    names = ("qb", "qh", "kn", "kp", "kg", "vn", "vp", "vg", "sn", "sp", "sg", "tb", "sum")
    sizes = {"GROUP": 7, "PAGE": 16, "WIDTH": width, "VALUE_WIDTH": width, "WINDOW": 512}
    sizes |= {"SPLIT_LEN": 128, "FEW_SPLITS": 8, "WHOLE": whole}
    blocks = {"BLOCK_H": 16, "BLOCK_N": block_n, "BLOCK_C": 128, "BLOCK_V": 128, "PDL": arch >= 90}
    args = {**pointers, **numbers, **{f"stride_{name}": "i32" for name in names}, **sizes, **blocks}
    compile_ahead(_decode_kernel, arch, args, num_stages=num_stages)


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_merges_compile_ahead_of_time(arch):
    pointers = {"kv_lens_ptr": "*i32", "out_ptr": "*bf16"}
    sizes = {"VALUE_WIDTH": 128, "BLOCK_V": 128, "WINDOW": 512, "SPLIT_LEN": 128, "FEW_SPLITS": 8, "PDL": arch >= 90}
    old = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "num_splits": "i32", "num_heads": "i32"}
    old |= {"BLOCK_H": 8, "BLOCK_S": 64}
    compile_ahead(_merge_splits_kernel, arch, pointers | sizes | old)
    new = {"acc_ptr": "*fp32", "sums_ptr": "*fp32", "num_parts": "i32", "stride_sum": "i32", "unit": "fp32"}
    sizes |= {"PDL": "ahead" if arch >= 90 else False, "HEADS": 30}
    for block_h, whole in ((1, False), (4, True)):
        runs = new | {"BLOCK_H": block_h, "WHOLE": whole}
        compile_ahead(_merge_runs_kernel, arch, pointers | sizes | runs, num_warps=block_h)
