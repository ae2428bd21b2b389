"""Tiles: names, the tuned table, and what every choice of a rule must keep to, over shapes that nobody tuned for."""

from __future__ import annotations

import doctest
import json

import pytest
import torch

from kernels import tiles
from kernels.tiles import (
    TUNED_FOLDER,
    TileConfig,
    grouped_rule,
    grouped_tile,
    linear_tile,
    operation_name,
    read_table,
    table_file,
    tile_of_name,
)
from tests.aot import SHARED_MEMORY

CARDS = {8: (108, SHARED_MEMORY[89]), 9: (132, SHARED_MEMORY[90]), 10: (148, SHARED_MEMORY[100])}
"""Generation -> multiprocessors, and bytes of shared memory of the smallest such card."""

LAYERS = [(8, 14336), (128, 768), (32, 2048), (60, 1408), (257, 40), (1, 10944), (3, 7)]


def test_worked_examples():
    assert doctest.testmod(tiles).failed == 0


@pytest.mark.parametrize("generation", CARDS)
@pytest.mark.parametrize(("num_slots", "num_columns"), LAYERS)
def test_every_choice_fits_the_card(generation, num_slots, num_columns):
    multiprocessors, shared = CARDS[generation]
    for num_rows in (1, 8, 64, 500, 4096, 40_000, 131_072):
        for products in (1, 2):
            for gathered in (False, True):
                for by_blocks in (True, False):
                    tile = grouped_rule(
                        num_rows,
                        num_slots,
                        generation,
                        num_products=products,
                        slot_bytes=2 * products * num_columns * 2048,
                        gathered=gathered,
                        by_blocks=by_blocks,
                    )
                    check_tile(tile, products, shared)
                    assert tile.form == "pointers" or (generation >= 9 and by_blocks)
                    assert tile.form not in ("specialized", "swapped") or generation == 9
        tile = linear_tile(num_rows, num_columns, torch.bfloat16, generation, multiprocessors)
        check_tile(tile, 1, shared)
        assert tile.form == "pointers"


def check_tile(tile: TileConfig, products: int, shared: int) -> None:
    # The last stage of a pipeline is loaded into the first one's place, or the epilogue takes as much.
    assert tile.shared_bytes(products) <= shared, tile
    sums = tile.block_m * tile.block_n * products
    consumers = {"specialized": 128, "swapped": 256}.get(tile.form, tile.num_warps * 32)
    assert 1 <= sums / consumers <= 128, f"{tile}: fp32 sums a thread"
    # Of 8 rows the operands are swapped: the tensor core takes 16 rows of one and 8 of the other.
    assert tile.block_m >= 8 and min(tile.block_n, tile.block_k) >= 16, f"{tile}: a product's least sizes"


def test_few_rows_give_most_multiprocessors_a_program():
    """One token of the benched layers, and decode rows of their linears."""
    for num_slots, top_k, columns in ((128, 8, 768), (128, 8, 2048), (8, 2, 14336), (8, 2, 4096), (60, 4, 1408)):
        products = 2 if columns in (768, 14336, 1408) else 1
        tile = grouped_rule(top_k, num_slots, 9, num_products=products, slot_bytes=1 << 24, gathered=True)
        assert top_k * -(-columns // tile.block_n) >= 0.7 * 132
    for columns in (2048, 3072, 4096, 5120, 6144, 151936):
        tile = linear_tile(8, columns, torch.bfloat16, 9, 132)
        assert -(-columns // tile.block_n) * tile.num_warps >= 0.9 * 132  # a warp for each at least


def test_many_rows_of_slots_that_the_cache_holds_have_warps_of_their_own_for_loading():
    """Gathered first products and second ones, from so many rows on; not first ones in order, and no larger slots."""
    for num_rows, slot_bytes, products, gathered, form in (
        (513, 1 << 24, 2, True, "specialized"),
        (513, 1 << 24, 1, False, "specialized"),
        (513, 1 << 24, 2, False, "tma"),
        (513, (1 << 24) + 1, 2, True, "tma"),
        (513, (1 << 24) + 1, 1, False, "tma"),
        (512, (1 << 24) + 1, 1, False, "specialized"),
    ):
        options = {"num_products": products, "slot_bytes": slot_bytes, "gathered": gathered}
        assert grouped_rule(2 * num_rows, 2, 9, **options).form == form
        assert grouped_rule(2 * num_rows, 2, 10, **options).form == "tma"


def test_dozens_of_rows_of_large_slots_are_the_columns_of_the_tensor_core():
    """From 49 to 96 rows a slot, of several slots; fewer rows and smaller slots keep tiles of rows."""
    for rows, num_slots, slot_bytes, form in (
        (64, 8, (1 << 24) + 1, "swapped"),
        (96, 8, 1 << 27, "swapped"),
        (48, 8, 1 << 27, "specialized"),
        (97, 8, 1 << 27, "specialized"),
        (64, 8, 1 << 24, "specialized"),
        (80, 1, 1 << 27, "specialized"),
    ):
        for products in (1, 2):
            options = {"num_products": products, "slot_bytes": slot_bytes, "gathered": products == 2}
            assert grouped_rule(rows * num_slots, num_slots, 9, **options).form == form
            assert grouped_rule(rows * num_slots, num_slots, 10, **options).form == "tma"


def test_dozens_of_rows_of_one_slot_leave_room_for_the_launches_beside_them():
    """A shared MLP's, from 17 to 64: no form of many registers, and as many programs as the columns give."""
    for rows, block_m in ((17, 32), (32, 32), (33, 64), (64, 64)):
        for generation in (9, 10):
            options = {"num_products": 2, "slot_bytes": 1 << 24, "gathered": False}
            assert grouped_rule(rows, 1, generation, **options) == TileConfig(block_m, 32, 128, 4, 4)
    assert grouped_rule(65, 1, 9, num_products=2, slot_bytes=1 << 24, gathered=False).form == "specialized"


def test_names_come_back():
    for tile in (
        TileConfig(16, 32, 128, 4, 6),
        TileConfig(128, 256, 64, 8, 4, "tma"),
        TileConfig(64, 128, 64, 4, 5, "specialized"),
    ):
        assert tile_of_name(tile.name) == tile


def test_the_tables_of_the_repository_are_well_formed():
    """Each entry names an operation as `operation_name` does and a tile that fits the card."""
    files = sorted(TUNED_FOLDER.glob("*.json"))
    assert files
    for path in files:
        table = read_table(path.stem.replace("_", " "))
        assert table
        for operation, by_rows in table.items():
            dtype, slots, columns, width = operation.split()
            products = 2 if columns.startswith("N2x") else 1
            numbers = int(slots[1:]), int(columns.removeprefix("N2x").removeprefix("N")), int(width[1:])
            assert operation_name(*numbers, products, getattr(torch, dtype)) == operation
            for rows, tile in by_rows.items():
                assert rows > 0
                check_tile(tile, products, SHARED_MEMORY[90])


def test_the_table_is_asked_before_the_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "TUNED_FOLDER", tmp_path)
    sizes = (8, 96, 64)
    operation = operation_name(*sizes, 1, torch.float32)
    tuned = TileConfig(16, 128, 32, 8, 2)
    table_file("Some Card").write_text(json.dumps({operation: {"40": tuned.name}}))
    assert table_file("Some Card").name == "Some_Card.json" and read_table("Another") == {}
    monkeypatch.setattr(tiles, "device_table", lambda device: read_table("Some Card"))

    def chosen(num_rows: int) -> TileConfig:
        device = torch.device("cpu")
        return grouped_tile(num_rows, *sizes, torch.float32, device, num_products=1, gathered=False, by_blocks=True)

    assert chosen(40) == chosen(20) == chosen(80) == tuned
    assert chosen(19) != tuned and chosen(81) != tuned


def test_a_tuned_form_that_cannot_read_the_operands_is_passed_over(monkeypatch):
    sizes = (8, 96, 64)
    tuned = TileConfig(64, 128, 64, 4, 5, "specialized")
    table = {operation_name(*sizes, 1, torch.float32): {40: tuned}}
    monkeypatch.setattr(tiles, "device_table", lambda device: table)
    options = {"num_products": 1, "gathered": False}
    device = torch.device("cpu")
    assert grouped_tile(40, *sizes, torch.float32, device, **options, by_blocks=True) == tuned
    assert grouped_tile(40, *sizes, torch.float32, device, **options, by_blocks=False).form == "pointers"
