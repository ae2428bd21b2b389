"""What fits beside what in the launch of experts_few.py: stages of weights, rows of x, columns of h. No kernel.

Knows sizes of one program's shared memory and pieces of work; knows no tensor.
"""

from __future__ import annotations

from kernels.checks import cdiv, next_power_of_2
from kernels.experts_few_choose import WARPS
from kernels.experts_few_feed import GROUPS, STAGE_BYTES
from kernels.experts_few_multiply import HALVES

_MOST_STAGES, FEWEST_STAGES = 11, 7
"""Seven are dsv2-lite's, fewer have not been measured."""

_SHARED_BYTES = 216 << 10
"""Of a program: all of a multiprocessor's but what its barriers and exchanged sums take."""

_PART = 512
"""Columns of one row's h that come at once, at most: stages are left beside the row of x, whatever the width of h.
Measured on an H200 at one row, us for router, experts and sum, as for more rows / as for one: qwen3 26.3 / 26.2,
dsv2-lite 40.0 / 39.7; mixtral, in two launches behind the router's choice / so 169.4 / 166.7. Whole steps, ms: 2.262 /
2.245, 1.815 / 1.802, 6.452 / 6.293."""

_PIECES_EACH = 1.8
"""Second pieces of 64 rows that each multiprocessor has at least, of one token; where there are fewer, pieces are of 32
rows, twice as many. Measured on an H200, whole steps of one row in ms, with 64 / 32: qwen3 (1.9 of 64 rows each) 2.245,
2.297; dsv2-lite (1.7) 1.782, 1.768; mixtral (1.0) 6.77, 6.31."""


def num_stages(num_tokens: int, width: int, num_hidden: int, num_experts: int = 0) -> int:
    """Of 16 KiB: as many as fit beside the rows of x, those of h that each group has, and what is handed over of so
    many experts that are chosen in the launch.

    >>> num_stages(8, 2048, 768), num_stages(8, 2048, 1408), num_stages(8, 4096, 14336)
    (9, 7, -23)
    >>> num_stages(1, 2048, 768), num_stages(1, 2048, 1408), num_stages(1, 4096, 14336)
    (9, 9, 7)
    """
    parts, choices = (HALVES.value, 1) if num_tokens == 1 else (1, WARPS.value)
    rows = 16 * (block_d(width) + GROUPS.value * parts * block_f(num_tokens, num_hidden))
    choice = 8 * choices * block_e(num_experts) if num_experts else 0
    return min(_MOST_STAGES, (_SHARED_BYTES - rows - choice) // STAGE_BYTES.value)


def second_rows(num_tokens: int, num_rows: int, width: int, num_programs: int) -> int:
    """Of w2, in a piece: of a second product that has so many rows of y, those of shared experts among them. Many
    tokens' slots are not known here: of more than one, 64.

    >>> second_rows(1, 8, 2048, 132), second_rows(1, 2, 4096, 132), second_rows(2, 4, 4096, 132)
    (64, 32, 64)
    """
    few = num_tokens == 1 and num_rows * cdiv(width, 64) < _PIECES_EACH * num_programs
    return 32 if few else 64


def block_d(width: int) -> int:
    """Columns of x in shared memory."""
    return max(256, next_power_of_2(width))


def block_f(num_tokens: int, num_hidden: int) -> int:
    """Columns of h that come at once, whole where they must."""
    columns = next_power_of_2(num_hidden)
    return min(_PART, max(256, columns)) if num_tokens == 1 else max(128, columns)


def block_e(num_experts: int) -> int:
    """Places of a row of scores: one a lane at least."""
    return max(32, next_power_of_2(num_experts))
