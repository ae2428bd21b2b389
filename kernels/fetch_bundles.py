"""Copies listed bundles from host memory to their places on the device, by multiprocessors that read over the link.

Knows rows, places and lists on the device (slot_tables.py); knows no slots. The host neither knows nor waits: host
memory that is pinned has addresses that kernels read, and a list is as long as the device made it. A list of guesses
may be called off while it is copied: each piece asks first.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false, reportOptionalOperand=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from kernels.checks import cdiv, uses_triton
from kernels.slot_tables import BY_PLACE, HEADER, STAMPS_AT, Places

# Measured on an H200, bundles of 9.4 MB, GB/s of one and of ten by programs of 4 warps: 4 programs 19 and 21, 8: 36 and
# 39, 16: 45 and 50.5, 32 and 132 the same; the copy engine 51 and 53. Without .cv 42 and 50. Beside a step's other
# kernels guesses want more: 24 layers of qwen3, one row, ms with 8, 16, 32 programs: 20.6, 13.9, 12.7. Pieces of 64 KiB
# with 16: 13.0.
_PROGRAMS = 32
_BLOCK, _UNROLL = 1024, 4  # elements of 8 bytes; a piece, 32 KiB, takes a program 10 us

MOST_TENSORS = 4
"""Of a bundle: weights of two products, scales of both."""

_AHEAD_AT, _FETCH_AT = tl.constexpr(BY_PLACE.index("ahead_place")), tl.constexpr(BY_PLACE.index("fetch_row"))
_HEADER = tl.constexpr(HEADER)


def flat_rows(tensor: Tensor) -> Tensor:
    """[n, ...] as rows of the widest integers that divide them, without a copy; what `fetch_bundles` takes."""
    row_bytes = tensor[0].nbytes
    dtype = torch.int64 if row_bytes % 8 == 0 else torch.int32 if row_bytes % 4 == 0 else torch.uint8
    return tensor.view(tensor.shape[0], -1).view(dtype)


def num_pieces(targets: Sequence[Tensor]) -> int:
    """Of a bundle with these rows."""
    return sum(cdiv(target.shape[1], _BLOCK * _UNROLL) for target in targets)


def fetch_bundles(
    places: Places, sources: Sequence[Tensor], targets: Sequence[Tensor], *, before: Places | None = None
) -> None:
    """targets[i][place] = sources[i][row] of each (row, place) that `place_slots` listed.

    `before`: the layer before; then of what `guess_ahead` listed. sources: flat rows in pinned host memory; targets:
    the same on the device. `fetch_bundles_reference` is the definition.
    """
    assert 1 <= len(targets) <= MOST_TENSORS, f"a bundle of {len(targets)} tensors"
    for source, target in zip(sources, targets, strict=True):
        given = (source.dtype, source.shape[1], source.is_contiguous(), target.is_contiguous(), target.shape[0])
        wanted = (target.dtype, target.shape[1], True, True, places.num_places)
        assert given == wanted, f"rows of {given} come to {wanted}"
    run = fetch_bundles_triton if uses_triton(targets[0]) else fetch_bundles_reference
    run(places, sources, targets, before=before)


# dst_i[place] = src_i[row]: see `fetch_bundles`. src_ptr, dst_ptr int [n, width], one each for every tensor of a bundle
# (NUM of them; the others are not looked at), pieces of it: BLOCK * UNROLL elements, the last one of a tensor fewer.
#   numbers_ptr, counts_ptr: of `Places`; before_ptr int64: the counts of the layer before
#   grid (PROGRAMS,): a program owns every so-manieth piece, bundle by bundle


@triton.jit
def _copy_piece(src_ptr, dst_ptr, width, row, place, piece, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """.cv: host memory is read anew each time, its bytes may have changed since."""
    for u in tl.static_range(UNROLL):
        at = (piece * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(src_ptr + row.to(tl.int64) * width + at, mask=at < width, cache_modifier=".cv")
        tl.store(dst_ptr + place.to(tl.int64) * width + at, values, mask=at < width)


@triton.jit
def _fetch_bundles_kernel(
    numbers_ptr,
    counts_ptr,
    before_ptr,
    src0_ptr,
    dst0_ptr,
    width0,
    src1_ptr,
    dst1_ptr,
    width1,
    src2_ptr,
    dst2_ptr,
    width2,
    src3_ptr,
    dst3_ptr,
    width3,
    G: tl.constexpr,
    NUM: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    STAMPS: tl.constexpr,
    TIMED: tl.constexpr,
):
    first, second = tl.cdiv(width0, BLOCK * UNROLL), tl.cdiv(width1, BLOCK * UNROLL)
    third, pieces = tl.cdiv(width2, BLOCK * UNROLL), tl.cdiv(width0, BLOCK * UNROLL)
    if NUM > 1:
        pieces += second
    if NUM > 2:
        pieces += third
    if NUM > 3:
        pieces += tl.cdiv(width3, BLOCK * UNROLL)
    lists_ptr = numbers_ptr + _HEADER
    if AHEAD:
        num = tl.load(numbers_ptr + 1)
        row_ptr, place_ptr = lists_ptr + (_AHEAD_AT + 2) * G, lists_ptr + _AHEAD_AT * G
        state_ptr, come_ptr = lists_ptr + (_AHEAD_AT + 3) * G, lists_ptr + (_AHEAD_AT + 4) * G
    else:
        num = tl.load(numbers_ptr)
        row_ptr, place_ptr = lists_ptr + _FETCH_AT * G, lists_ptr + (_FETCH_AT + 1) * G
    program, copied = tl.program_id(0), tl.program_id(0) * 0
    if TIMED:
        stamps_ptr = counts_ptr + STAMPS + (3 if AHEAD else 0)
        if (program == 0) & (num > 0):
            tl.store(stamps_ptr + 1, globaltimer())
            if AHEAD:  # nothing is computed while the layer before waits for its own bundles
                ready = max(tl.load(before_ptr + STAMPS), tl.load(before_ptr + STAMPS + 2))
                tl.store(stamps_ptr, max(tl.load(stamps_ptr), ready))
    for work in range(program, num * pieces, tl.num_programs(0)):
        item, piece = work // pieces, work % pieces
        wanted = item >= 0
        if AHEAD:
            wanted = tl.atomic_max(state_ptr + item, 1) < 2
        if wanted:
            row, place = tl.load(row_ptr + item), tl.load(place_ptr + item)
            if piece < first:
                _copy_piece(src0_ptr, dst0_ptr, width0, row, place, piece, BLOCK, UNROLL)
            elif NUM > 1:
                piece -= first
                if piece < second:
                    _copy_piece(src1_ptr, dst1_ptr, width1, row, place, piece, BLOCK, UNROLL)
                elif NUM > 2:
                    piece -= second
                    if piece < third:
                        _copy_piece(src2_ptr, dst2_ptr, width2, row, place, piece, BLOCK, UNROLL)
                    elif NUM > 3:
                        _copy_piece(src3_ptr, dst3_ptr, width3, row, place, piece - third, BLOCK, UNROLL)
            if AHEAD:
                tl.atomic_add(come_ptr + item, 1)
            copied += 1
    if TIMED:  # noqa: SIM102 (it is known when compiled)
        if copied > 0:
            tl.atomic_max(stamps_ptr + 2, globaltimer())


def fetch_bundles_triton(
    places: Places, sources: Sequence[Tensor], targets: Sequence[Tensor], *, before: Places | None = None
) -> None:
    """`fetch_bundles` as one launch."""
    none = (sources[0], targets[0], 1)
    tensors = [(source, target, target.shape[1]) for source, target in zip(sources, targets, strict=True)]
    tensors += [none] * (MOST_TENSORS - len(tensors))
    _fetch_bundles_kernel[(_PROGRAMS,)](
        places.numbers,
        places.counts,
        None if before is None else before.counts,
        *(each for of_tensor in tensors for each in of_tensor),
        G=places.num_places,
        NUM=len(targets),
        AHEAD=before is not None,
        BLOCK=_BLOCK,
        UNROLL=_UNROLL,
        STAMPS=STAMPS_AT,
        TIMED=places.numbers.is_cuda,
        num_warps=4,
    )


def fetch_bundles_reference(
    places: Places, sources: Sequence[Tensor], targets: Sequence[Tensor], *, before: Places | None = None
) -> None:
    """The definition."""
    kind = "fetch" if before is None else "ahead"
    num = int(places.numbers[0 if before is None else 1])
    rows, to = places.part(f"{kind}_row")[:num].tolist(), places.part(f"{kind}_place")[:num].tolist()
    for number, (row, place) in enumerate(zip(rows, to)):
        if before is not None:
            if places.part("ahead_state")[number] == 2:
                continue
            places.part("ahead_state")[number] = 1
            places.part("ahead_pieces")[number] = num_pieces(targets)
        for source, target in zip(sources, targets, strict=True):
            target[place] = source[row]
