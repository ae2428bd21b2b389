"""Gather of cached rows out of pages: order, bounds, and no use of table entries beyond the tokens copied."""

from __future__ import annotations

import pytest
import torch

from kernels.gather import _gather_kernel, gather_paged, gather_paged_reference, gather_paged_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits
from tests.paged_cache import draw, index, paged_cache, starts


def check_gather(gather, page, width, token_starts, counts, padding, dtype, device):
    """Rows of `width` columns, three eighths of which are the second part."""
    latent = width - width * 3 // 8
    ends = [start + count for start, count in zip(token_starts, counts)]
    cache = paged_cache(ends, page=page, width=width, dtype=dtype, device=device)
    latent_RL, rest_RX = gather(
        cache.k_cache_NPGC[:, :, 0],
        cache.block_tables_BM,
        index(token_starts, device),
        starts(counts, device),
        num_rows=sum(counts) + padding,
        latent=latent,
    )
    wanted = [cache.keys[b][start:end, 0] for b, (start, end) in enumerate(zip(token_starts, ends))]
    wanted.append(torch.zeros(padding, width, dtype=dtype, device=device))
    assert latent_RL.shape[1] == latent and latent_RL.is_contiguous() and rest_RX.is_contiguous()
    assert_same_bits(torch.cat([latent_RL, rest_RX], dim=1), torch.cat(wanted))


GATHERS = [
    pytest.param(16, 72, [0, 3, 16, 40], [5, 0, 17, 1], 3, id="one-sequence-without-rows"),
    pytest.param(1, 40, [0, 7], [0, 9], 0, id="page1-first-empty"),
    pytest.param(17, 16, [16, 17, 18], [1, 17, 0], 1, id="page17-last-empty"),
    pytest.param(64, 576, [0], [65], 0, id="DeepSeek-V3-row"),
    pytest.param(16, 8, [0] * 20, [1] * 20, 2, id="more-sequences-than-one-search-step"),
    pytest.param(16, 8, [2, 5], [0, 0], 0, id="no-rows"),
    pytest.param(16, 8, [2, 5], [0, 0], 4, id="only-padding"),
]


@pytest.mark.parametrize(("page", "width", "token_starts", "counts", "padding"), GATHERS)
def test_kernel_copies_each_row(backend, page, width, token_starts, counts, padding):
    check_gather(gather_paged_triton, page, width, token_starts, counts, padding, backend.dtype, backend.device)


@pytest.mark.parametrize("gather", [gather_paged, gather_paged_reference])
@pytest.mark.parametrize(("page", "width", "token_starts", "counts", "padding"), GATHERS)
def test_reference_copies_each_row(gather, page, width, token_starts, counts, padding):
    check_gather(gather, page, width, token_starts, counts, padding, torch.bfloat16, "cpu")


@pytest.mark.gpu
def test_C16_rows_of_the_last_block_above_two_to_the_31():
    page, width = 64, 576
    num_blocks = 2**31 // (page * width) + 2
    cache_NPX = torch.full((num_blocks, page, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache_NPX[-1] = draw(page, width, dtype=torch.bfloat16, device="cuda")
    table_BM = index([0, num_blocks - 1], "cuda").view(1, 2)
    operands = (cache_NPX, table_BM, index([page], "cuda"), starts([page], "cuda"))
    parts = gather_paged(*operands, num_rows=page, latent=512)
    assert_same_bits(torch.cat(parts, dim=1), cache_NPX[-1])


@aot
@pytest.mark.parametrize(
    ("arch", "cached"),
    [*((arch, "bf16") for arch in ARCHS), *((arch, "fp8e4nv") for arch in ARCHS if arch >= 89)],
)
@pytest.mark.parametrize("aligned", [True, False])
def test_kernel_compiles_ahead_of_time(arch, cached, aligned):
    pointers: dict[str, str | None] = {"cache_ptr": f"*{cached}", "latent_ptr": "*bf16", "rest_ptr": "*bf16"}
    pointers["scales_ptr"] = None if cached == "bf16" else "*fp32"
    indices = dict.fromkeys(("tables_ptr", "token_starts_ptr", "row_starts_ptr"), "*i32")
    numbers = dict.fromkeys(("num_rows", "num_sequences", "page_size", "stride_cn", "stride_cp", "stride_tb"), "i32")
    numbers |= {"stride_sn": "i32", "stride_sp": "i32"}
    blocks = {"LATENT": 512, "REST": 64, "BLOCK_R": 4, "BLOCK_L": 512, "BLOCK_X": 64, "BLOCK_B": 64}
    args = {**pointers, **indices, **numbers, **blocks, "PDL": arch >= 90}
    compile_ahead(_gather_kernel, arch, args, aligned=aligned)
