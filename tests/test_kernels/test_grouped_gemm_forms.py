"""The forms of the grouped product that read blocks by the copy engine compile, for each tile of the rule."""

from __future__ import annotations

import pytest
import torch

from kernels import grouped_gemm_specialized
from kernels.grouped_gemm_specialized import ProductTile, _grouped_gemm_specialized_kernel, launch_options
from kernels.grouped_gemm_swapped import _grouped_gemm_swapped_kernel
from kernels.grouped_gemm_tma import _grouped_gemm_tma_kernel, tma_serves
from kernels.tiles import grouped_rule, tile_of_name
from tests.aot import aot, compile_ahead
from tests.gluon_aot import box, compile_gluon_ahead


def block_cases() -> list[tuple[int, str, bool, bool]]:
    """(arch, tile, SwiGLU, gathered) of the rule from 12 rows a slot on."""
    cases = set()
    for arch in (90, 100):
        for rows in (12, 32, 64, 256, 4096):
            for swiglu, gathered in ((False, False), (True, True), (True, False)):
                for slots, slot_bytes in ((1, 1 << 24), (8, 1 << 24), (8, 1 << 26)):
                    options = {"num_products": 1 + swiglu, "slot_bytes": slot_bytes, "gathered": gathered}
                    tile = grouped_rule(rows * slots, slots, arch // 10, **options)
                    cases.add((arch, tile.name, swiglu, gathered))
    return sorted(cases)


@aot
@pytest.mark.parametrize(("arch", "name", "swiglu", "gathered"), block_cases())
def test_compiles(arch, name, swiglu, gathered):
    tile, products = tile_of_name(name), 1 + swiglu
    args: dict[str, object] = {"num_columns": "i32", "width": "i32", "num_slots": "i32"}
    args |= {"offsets_ptr": "*i32", "y_ptr": "*bf16", "stride_y": "i32", "index_ptr": "*i32" if gathered else None}
    args |= {"PDL": True}
    blocks = (tile.block_m, tile.block_n, tile.block_k)
    if tile.form in ("specialized", "swapped"):
        swapped = tile.form == "swapped"
        args |= {"x": "*bf16" if gathered else box("bf16", 16 if swapped else tile.block_m, tile.block_k)}
        args |= {"w_desc": box("bf16", 128 // products if swapped else tile.block_n, tile.block_k)}
        group_n = 1 if swapped or gathered else 2
        product_tile = ProductTile(swiglu, *blocks, 8, 1 + gathered, tile.num_stages, group_n)
        args |= {"TILE": product_tile, "stride_x8": "i32"}
        kernel = _grouped_gemm_swapped_kernel if swapped else _grouped_gemm_specialized_kernel
        compile_gluon_ahead(kernel, args, num_warps=tile.num_warps)
        return
    args |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks)) | {"SWIGLU": swiglu, "GROUP_M": 8}
    args |= {"SLOT_STEP": 1 + gathered}
    args |= {"x": "*bf16" if gathered else f"tensordesc<bf16[{tile.block_m}, {tile.block_k}]>"}
    args |= {"w_desc": f"tensordesc<bf16[{products}, {tile.block_n}, {tile.block_k}]>", "BLOCK_S": 128, "EVEN": True}
    args |= {"stride_x": "i32"}
    args |= {"PERSISTENT": not gathered and tile.num_warps == 8}
    compile_ahead(_grouped_gemm_tma_kernel, arch, args, num_warps=tile.num_warps, num_stages=tile.num_stages)


def test_what_blocks_can_be_read_of():
    x_XD, w_SND = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    assert tma_serves(x_XD, w_SND)
    assert not tma_serves(x_XD, w_SND[:, :4])  # weights not in one piece
    assert not tma_serves(x_XD[:, 1:], w_SND)  # rows begin two bytes after a multiple of 16
    assert not tma_serves(torch.zeros(3, 36, dtype=torch.bfloat16), torch.zeros(2, 8, 36, dtype=torch.bfloat16))


def test_many_tiles_of_many_rows_wait_for_the_end_of_the_kernel_before(monkeypatch):
    monkeypatch.setattr(grouped_gemm_specialized, "dependent_launch", lambda x: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(grouped_gemm_specialized, "num_multiprocessors", lambda device: 10)
    x, beside = torch.zeros(1), {"PDL": True, "launch_pdl": True}
    assert launch_options(x, 40, 97) == {"PDL": False}
    assert launch_options(x, 39, 97) == beside  # few tiles
    assert launch_options(x, 40, 96) == beside  # few rows
