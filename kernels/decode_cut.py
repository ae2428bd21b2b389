"""How decode attention of one step is cut into programs: splits or runs of them, and the tiles of each.

Knows numbers of programs and keys, and what an H200 took for them; launches nothing. Where a sequence is cut into
splits follows from its own length (split_kv.py); what is chosen here by the whole step changes no bit.
"""

from __future__ import annotations

from kernels.split_kv import SplitRule
from kernels.split_runs import RUN, most_runs
from kernels.tiles import TileConfig

SPLITS = SplitRule(128, few=8)
"""On an H200, 32 heads over 4 of 128, microseconds with splits of 128 / 256 / 512 keys: one sequence of 576 6.7 / 8.7 /
13.2, 256 of 576 95 / 92 / 94, 64 of 4096 149 / 141 / 135."""

FEW_PROGRAMS = 16
"""Up to so many kv heads of all sequences the launch takes along what comes before it (attention_decode_rows.py).
Measured on an H200, 577 keys, microseconds, so / with a launch for that: 8 heads (mixtral, 1 row) 4.4 / 6.9, 8 (qwen3,
2 rows) 4.9 / 7.6, 16 (qwen3, 4 rows) 5.4 / 8.1; 16 of up to 2100 keys 13.8 / 14.9. More were not tried."""


def decode_parts(num_sequences: int, num_kv_heads: int, max_kv_len: int, window: int = 0) -> int:
    """Partial results that the workspace of a step has room for, of each sequence: runs of splits, or splits."""
    return most_parts(max_kv_len, window, whole=takes_runs(num_sequences * num_kv_heads, max_kv_len))


def most_parts(max_kv_len: int, window: int, rule: SplitRule = SPLITS, *, whole: bool) -> int:
    """No sequence of at most this length has more runs (`whole`) or splits."""
    return most_runs(rule, max_kv_len, window) if whole else rule.most(max_kv_len, window)


def takes_runs(num_programs: int, max_kv_len: int, rule: SplitRule = SPLITS) -> bool:
    """Whether a program takes a run of splits, where so many would take the first runs. No bit depends on it.

    On an H200, which has 132 multiprocessors, 32 heads over 4, microseconds of splits, their merge included, and of
    runs. 576 keys each: 96 programs of a run 13.8 and 14.8, 128 17.7 and 15.4, 256 29 and 26, 512 52 and 43, 1024 94
    and 79, 1536 137 and 119; 2000 keys: 64 25 and 45, 128 44 and 45. Under longer bounds more are needed: 4096 keys,
    128 programs 76 and 120, 192 108 and 136 (two stages), 256 138 and 130 (four), 512 269 and 260.
    """
    return num_programs >= (128 if _one_run(max_kv_len, rule) else 224)


def _one_run(max_kv_len: int, rule: SplitRule) -> bool:
    return max_kv_len <= 2 * RUN.value * rule.length


def decode_tile(num_programs: int, max_kv_len: int, rule: SplitRule = SPLITS, *, wide: bool, whole: bool) -> TileConfig:
    """Keys of a tile, warps and stages, for so many programs of a split each, or of the first runs. Stages change no
    bit, the others do: they follow from the dtype alone (`wide`: fp32).

    Four stages leave room for two programs a multiprocessor, three for three, two for four. On an H200, which has 132,
    32 heads over 4, whole runs, two, three and four stages: 128 programs of 576 keys 21.5, 14.8 and 16.3 us, 256 27.4,
    27.1 and 25.0, 512 41.7, 49.7 and 47.7, 1024 78, 80 and 87; 256 of 4096 180, 144 and 130; 2048 of all lengths up to
    1900 265, 255 and 257. Splits of 512 keys, two and three stages: 256 programs 23 and 26 us, 512 of them 48 and 40.
    """
    if wide:
        return TileConfig(16, 32, 0, num_warps=4, num_stages=1)
    if not whole:
        num_stages = 2 if num_programs > 396 else 3
    elif num_programs > 396:
        num_stages = 2 if num_programs <= 1056 else 3
    else:
        num_stages = 3 if num_programs > 264 or (num_programs <= 132 and _one_run(max_kv_len, rule)) else 4
    return TileConfig(16, 64, 0, num_warps=4, num_stages=num_stages)
