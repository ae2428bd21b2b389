"""The inputs of a decode step, made on the device from a few numbers a row and what the device keeps of each sequence.

Knows rows, places and block tables; knows nothing of requests or the network. A place is where the device keeps what
belongs to one running sequence from step to step: its block table, its newest token, how its tokens are drawn.

    rows_4B[0, b]  token id, or -1: the token that the last step drew there, newest_P[place]
    rows_4B[1, b]  place
    rows_4B[2, b]  position of the row's token; -1: the row is padding
    rows_4B[3, b]  block that holds this position; it is written to its entry of the table, so a table grows with its
                   sequence and needs no copy of its own

A padding row writes no cache (slot -1), reads none (length 0), and is not real. Only its place's table is touched, at
entry 0: padding needs a place that nobody else has.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import assert_dtype, assert_same_device, assert_shape, uses_triton
from kernels.dependent_launch import dependent_launch, wait_for_inputs

TABLE_BLOCK = 256


class Places(NamedTuple):
    """What the device keeps of each running sequence, by place."""

    tables_PM: Tensor  # int32, physical block of each logical block; past a sequence's end any valid id
    newest_P: Tensor  # int64, the token drawn last; -1 where its logits held NaN
    temperature_P: Tensor  # fp32, 0: greedy
    seed_P: Tensor  # int64


class DecodeInputs(NamedTuple):
    """One row a sequence. `draw_position_B` is the position of the token that the row's logits give."""

    token_ids_B: Tensor  # int64
    positions_B: Tensor  # int64
    slot_mapping_B: Tensor  # int64
    kv_lens_B: Tensor  # int32
    block_tables_BM: Tensor  # int32
    real_B: Tensor  # bool
    temperature_B: Tensor  # fp32
    seed_B: Tensor  # int64
    draw_position_B: Tensor  # int64


def decode_inputs(rows_4B: Tensor, places: Places, *, block_size: int, width: int) -> DecodeInputs:
    """New tensors, tables `width` entries wide; `places.tables_PM` gets the rows' blocks. rows int64 [4, B].

    `decode_inputs_reference` is the definition.
    """
    if uses_triton(rows_4B):
        return decode_inputs_triton(rows_4B, places, block_size=block_size, width=width)
    return decode_inputs_reference(rows_4B, places, block_size=block_size, width=width)


# Pointers as the records above say; rows_ptr int64 [4, B], tables_ptr int32 [P, M]. Grid (B,): program b owns row b and
# its sequence's table. Its own new entry is put in while copying, so it need not be read back.
@triton.jit(do_not_specialize=["batch", "width"])
def _decode_inputs_kernel(
    rows_ptr,
    tables_ptr,
    newest_ptr,
    temperature_ptr,
    seed_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    kv_lens_ptr,
    block_tables_ptr,
    real_ptr,
    row_temperature_ptr,
    row_seed_ptr,
    draw_position_ptr,
    batch,
    table_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(rows_ptr + row)
    place = tl.load(rows_ptr + batch + row)
    position = tl.load(rows_ptr + 2 * batch + row)
    block = tl.load(rows_ptr + 3 * batch + row)
    newest = tl.load(newest_ptr + place)
    real = position >= 0
    at = tl.maximum(position, 0)
    entry = at // BLOCK_SIZE
    tl.store(token_ids_ptr + row, tl.where(token >= 0, token, tl.maximum(newest, 0)))
    tl.store(positions_ptr + row, at)
    tl.store(slots_ptr + row, tl.where(real, block * BLOCK_SIZE + at % BLOCK_SIZE, -1))
    tl.store(kv_lens_ptr + row, (position + 1).to(tl.int32))
    tl.store(real_ptr + row, real)
    tl.store(row_temperature_ptr + row, tl.load(temperature_ptr + place))
    tl.store(row_seed_ptr + row, tl.load(seed_ptr + place))
    tl.store(draw_position_ptr + row, position + 1)
    tables_ptr += place * table_stride
    block_tables_ptr += row * width
    for start in range(0, width, TABLE_BLOCK):
        entries = start + tl.arange(0, TABLE_BLOCK)
        known = tl.load(tables_ptr + entries, mask=entries < width, other=0)
        known = tl.where(entries == entry, block.to(tl.int32), known)
        tl.store(block_tables_ptr + entries, known, mask=entries < width)
    tl.store(tables_ptr + entry, block.to(tl.int32))


def decode_inputs_triton(rows_4B: Tensor, places: Places, *, block_size: int, width: int) -> DecodeInputs:
    """The kernel's launcher; also what the interpreter's tests call on CPU tensors."""
    _check_operands(rows_4B, places, width)
    inputs = _empty_inputs(rows_4B, width)
    batch = rows_4B.shape[1]
    if batch > 0:
        _decode_inputs_kernel[(batch,)](
            rows_4B,
            *places,
            *inputs,
            batch,
            places.tables_PM.stride(0),
            width,
            BLOCK_SIZE=block_size,
            TABLE_BLOCK=TABLE_BLOCK,
            num_warps=1,
            **dependent_launch(rows_4B),
        )
    return inputs


def _empty_inputs(rows_4B: Tensor, width: int) -> DecodeInputs:
    batch = rows_4B.shape[1]
    return DecodeInputs(
        token_ids_B=rows_4B.new_empty(batch),
        positions_B=rows_4B.new_empty(batch),
        slot_mapping_B=rows_4B.new_empty(batch),
        kv_lens_B=rows_4B.new_empty(batch, dtype=torch.int32),
        block_tables_BM=rows_4B.new_empty((batch, width), dtype=torch.int32),
        real_B=rows_4B.new_empty(batch, dtype=torch.bool),
        temperature_B=rows_4B.new_empty(batch, dtype=torch.float32),
        seed_B=rows_4B.new_empty(batch),
        draw_position_B=rows_4B.new_empty(batch),
    )


def _check_operands(rows_4B: Tensor, places: Places, width: int) -> None:
    assert_shape("rows_4B", rows_4B, (4, None))
    assert_dtype("rows_4B", rows_4B, torch.int64)
    assert rows_4B.is_contiguous(), "rows_4B must lie together in memory"
    assert_shape("tables_PM", places.tables_PM, (None, None))
    assert places.tables_PM.is_contiguous(), "tables_PM must lie together in memory"
    assert 0 < width <= places.tables_PM.shape[1], f"tables of {places.tables_PM.shape[1]} entries, {width} wanted"
    for name, x, dtype in (
        ("tables_PM", places.tables_PM, torch.int32),
        ("newest_P", places.newest_P, torch.int64),
        ("temperature_P", places.temperature_P, torch.float32),
        ("seed_P", places.seed_P, torch.int64),
    ):
        assert_dtype(name, x, dtype)
        assert x.shape[0] == places.newest_P.shape[0], f"{name} has {x.shape[0]} places"
    assert_same_device(rows_4B, **places._asdict())


def decode_inputs_reference(rows_4B: Tensor, places: Places, *, block_size: int, width: int) -> DecodeInputs:
    """The definition, in plain torch."""
    _check_operands(rows_4B, places, width)
    token_B, place_B, position_B, block_B = rows_4B
    real_B = position_B >= 0
    at_B = position_B.clamp_min(0)
    places.tables_PM[place_B, at_B // block_size] = block_B.int()
    return DecodeInputs(
        token_ids_B=torch.where(token_B >= 0, token_B, places.newest_P[place_B].clamp_min(0)),
        positions_B=at_B,
        slot_mapping_B=torch.where(real_B, block_B * block_size + at_B % block_size, -1),
        kv_lens_B=(position_B + 1).int(),
        block_tables_BM=places.tables_PM[place_B, :width],
        real_B=real_B,
        temperature_B=places.temperature_P[place_B],
        seed_B=places.seed_P[place_B],
        draw_position_B=position_B + 1,
    )
