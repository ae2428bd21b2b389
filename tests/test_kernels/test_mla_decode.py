"""MLA decode: against fp64, against the reference, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from kernels.mla_decode import _mla_kernel, mla_decode, mla_decode_reference, mla_decode_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.paged_cache import assert_accurate, dense_attention, draw, index, paged_cache

SHAPES = [
    # page, heads, latent, rope, lens
    pytest.param(16, 4, 64, 16, [1, 0, 127, 128, 129], id="around-a-tile"),
    pytest.param(17, 16, 40, 24, [3, 255, 257], id="odd-page-odd-widths-around-a-split"),
    pytest.param(64, 3, 32, 8, [65, 0], id="page64-three-heads"),
    pytest.param(1, 1, 16, 16, [9, 1], id="page1-one-head"),
    pytest.param(16, 40, 32, 16, [5, 0, 33], id="heads-of-two-tiles-longer-splits"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def exact(q_BHX, cache, latent, dtype=torch.float64):
    """All heads read the same row; its first `latent` entries are the value."""
    rows = [
        dense_attention(q[None], rows, rows[..., :latent], scale=0.2, query_offset=rows.shape[0] - 1, dtype=dtype)[0]
        for q, rows in zip(q_BHX, cache.keys)
    ]
    return torch.cat(rows)


def run(attend, q_BHX, cache, latent, max_kv_len=None, rows=slice(None)):
    return attend(
        q_BHX[rows, :, :latent],
        q_BHX[rows, :, latent:],
        cache.k_cache_NPGC[:, :, 0],
        cache.block_tables_BM[rows],
        cache.kv_lens_B[rows],
        scale=0.2,
        max_kv_len=int(cache.kv_lens_B[rows].max()) if max_kv_len is None else max_kv_len,
    )


def draw_case(page, heads, latent, rope, lens, dtype, device):
    cache = paged_cache(lens, page=page, width=latent + rope, dtype=dtype, device=device)
    return draw(len(lens), heads, latent + rope, dtype=dtype, device=device, seed=7), cache


@pytest.mark.parametrize(("page", "heads", "latent", "rope", "lens"), SHAPES)
def test_kernel(backend, page, heads, latent, rope, lens):
    q_BHX, cache = draw_case(page, heads, latent, rope, lens, backend.dtype, backend.device)
    ours = run(mla_decode_triton, q_BHX, cache, latent)
    assert ours.dtype == backend.dtype
    assert_accurate(ours, exact(q_BHX, cache, latent, backend.dtype), exact(q_BHX, cache, latent))
    assert max_rel(ours, run(mla_decode_reference, q_BHX, cache, latent)) < TOLERANCE[backend.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_for_the_models_widths(heads, dtype):
    """DeepSeek's latent of 512 and rotary key of 64; lengths around the splits of 256 and of 1024 keys."""
    q_BHX, cache = draw_case(64, heads, 512, 64, [1, 0, 255, 257, 1025, 3000], dtype, "cuda")
    ours = run(mla_decode_triton, q_BHX, cache, 512)
    assert_accurate(ours, exact(q_BHX, cache, 512, dtype), exact(q_BHX, cache, 512))


@pytest.mark.parametrize("attend", [mla_decode, mla_decode_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page", "heads", "latent", "rope", "lens"), SHAPES)
def test_reference(attend, dtype, page, heads, latent, rope, lens):
    q_BHX, cache = draw_case(page, heads, latent, rope, lens, dtype, "cpu")
    ours = run(attend, q_BHX, cache, latent)
    assert_accurate(ours, exact(q_BHX, cache, latent, dtype), exact(q_BHX, cache, latent))


def check_company(lens, heads, latent, rope, dtype, device):
    """A row alone, in a batch, in a batch of another order, and under another bound has the same bits."""
    q_BHX, cache = draw_case(16, heads, latent, rope, lens, dtype, device)
    together = run(mla_decode, q_BHX, cache, latent)
    assert not together.isnan().any()
    assert_same_bits(run(mla_decode, q_BHX, cache, latent, max_kv_len=8192), together)
    backwards = list(range(len(lens)))[::-1]
    assert_same_bits(run(mla_decode, q_BHX, cache, latent, rows=backwards)[backwards], together)
    for b in range(len(lens)):
        assert_same_bits(run(mla_decode, q_BHX, cache, latent, rows=slice(b, b + 1)), together[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "latent", "rope"), [(8, 64, 32), (3, 40, 24), (1, 32, 8)])
def test_reference_gives_a_row_the_same_bits_in_any_company(dtype, heads, latent, rope):
    check_company([1, 40, 127, 128, 129, 300, 17], heads, latent, rope, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_kernel_gives_a_row_the_same_bits_in_any_company(heads):
    check_company([1 + 37 * b % 1500 for b in range(64)], heads, 512, 64, torch.bfloat16, "cuda")


def test_no_sequences_and_no_keys(backend):
    q_BHX, cache = draw_case(16, 2, 16, 16, [0, 0], backend.dtype, backend.device)
    zeros = torch.zeros_like(q_BHX[..., :16])
    assert_same_bits(run(mla_decode_triton, q_BHX, cache, 16, max_kv_len=0), zeros)
    assert_same_bits(run(mla_decode_triton, q_BHX, cache, 16, max_kv_len=400), zeros)
    assert run(mla_decode_triton, q_BHX, cache, 16, max_kv_len=400, rows=slice(0, 0)).shape == (0, 2, 16)


@pytest.mark.gpu
def test_C16_last_block_of_a_cache_above_two_to_the_31():
    page, latent = 64, 512
    num_blocks = 2**31 // (page * 576) + 2
    cache_NPX = torch.full((num_blocks, page, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache_NPX[-1] = draw(page, 576, dtype=torch.bfloat16, device="cuda")
    q_BHX = draw(1, 16, 576, dtype=torch.bfloat16, device="cuda", seed=1)
    table_BM = index([num_blocks - 1], "cuda").view(1, 1)
    lens = index([page], "cuda")
    parts = (q_BHX[..., :latent], q_BHX[..., latent:])
    out = mla_decode(*parts, cache_NPX, table_BM, lens, scale=0.05, max_kv_len=page)
    rows = cache_NPX[-1, :, None]
    wanted = dense_attention(q_BHX, rows, rows[..., :latent], scale=0.05, query_offset=page - 1)[0]
    assert max_rel(out, wanted) < TOLERANCE[torch.bfloat16]


@aot
@pytest.mark.parametrize(
    ("arch", "dtype", "block_h", "block_n", "num_warps", "num_stages", "cached"),
    [
        *((arch, "bf16", 16, 32, 4, 2, "bf16") for arch in ARCHS),
        (90, "bf16", 32, 32, 4, 3, "bf16"),
        (80, "fp32", 16, 16, 4, 1, "fp32"),
        *((arch, "bf16", 32, 32, 4, 3 if arch >= 90 else 2, "fp8e4nv") for arch in ARCHS if arch >= 89),
        (90, "fp32", 16, 16, 4, 1, "fp8e4nv"),
    ],
)
def test_kernel_compiles_ahead_of_time(arch, dtype, block_h, block_n, num_warps, num_stages, cached):
    pointers = dict.fromkeys(("q_latent_ptr", "q_pe_ptr"), f"*{dtype}") | {"cache_ptr": f"*{cached}"}
    pointers["scales_ptr"] = None if cached == dtype else "*fp32"
    pointers |= {"tables_ptr": "*i32", "kv_lens_ptr": "*i32", "out_ptr": f"*{dtype}"}
    pointers |= {"parts_ptr": "*fp16", "lse_ptr": "*fp32"}
    numbers = {"scale_log2": "fp32", "num_heads": "i32"}
    strides = {f"stride_{name}": "i32" for name in ("lb", "lh", "rb", "rh", "cn", "cp", "sn", "sp", "tb")}
    sizes = {"PAGE": 64, "LATENT": 512, "ROPE": 64, "SPLIT_LEN": 128, "FEW_SPLITS": 8, "PDL": arch >= 90}
    blocks = {"BLOCK_H": block_h, "BLOCK_N": block_n, "BLOCK_L": 512, "BLOCK_R": 64}
    args = {**pointers, **numbers, **strides, **sizes, **blocks}
    compile_ahead(_mla_kernel, arch, args, num_warps=num_warps, num_stages=num_stages)
