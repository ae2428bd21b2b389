"""attention_rows.py for up to 16 kv heads of all rows; `new` stops at four (FEW_PROGRAMS, kernels/decode_cut.py).
Predicted: mixtral -1.0 to -2.0 us a layer at one row (-32 to -64 us a step), qwen3 as much at two to four rows.

With the chain of today a launch of its own for norm, turn and store was as good from 8 heads on (mixtral's row 204.7 us
a layer for 205.0, qwen3's four rows 102.3 for 102.9): each program turned its queries and then its key again on the way
to its first key. With attention_rows.py that way is one round and 570 instructions, beside which the other launch has
its own: a wait, a round, a norm, and what lies between two launches (2.8 us at 256 rows, docs/profile.md).
Measure it beside attention_rows.py: `with=attention_rows_more` puts both in.

To land it: FEW_PROGRAMS, with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafts import attention_rows
from benchmarks.drafts.case import Case
from kernels import attention_decode as in_use
from kernels.new_rows import NewRows
from kernels.qk_rope_store import qk_rope_store
from launch.replay import rotation_length

_FEW_PROGRAMS = 16


def _apart(
    q_BHC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGV: Tensor, *rest: Any, new: NewRows, **options: Any
) -> Tensor:
    """In use from five heads on: a launch for norm, turn and store, then attention."""
    rows = (new.k_BGC, new.v_BGC, new.norms, new.rope, k_cache_NPGC, v_cache_NPGV, new.slots_B)
    q_BHC = qk_rope_store(q_BHC, *rows, None)
    return attention_rows._attention_decode_triton(q_BHC, k_cache_NPGC, v_cache_NPGV, *rest, **options)


def cases(device: torch.device) -> Iterator[Case]:
    """mixtral's one row, qwen3's two and four; 16 heads of unequal lengths, one row of which is not stored."""
    shapes = [
        ("mixtral 1 row, 577 keys", [577], 32, 8, False),
        ("qwen3 2 rows, 577 keys", [577, 577], 32, 4, True),
        ("qwen3 4 rows, 577 keys", [577] * 4, 32, 4, True),
        ("4 rows of 4 heads, 1 to 2100 keys", [1, 700, 1025, 2100], 20, 4, True),
    ]
    cuda = device.type == "cuda"
    runs = {"apart": _apart, "ahead": attention_rows.attention_decode_triton}
    for name, lens, heads, kv_heads, normed in shapes if cuda else shapes[3:]:
        rotation = rotation_length(512 * sum(lens) * kv_heads, most=96) if cuda else 1
        shape = (lens, heads, kv_heads, 0, 128, False, normed)
        forms = {
            form: [attention_rows._call(run if cuda else None, *shape, device, seed) for seed in range(rotation)]
            for form, run in runs.items()
        }
        yield Case(name, forms)


def install() -> None:
    attention_rows.install()
    in_use.FEW_PROGRAMS = _FEW_PROGRAMS
