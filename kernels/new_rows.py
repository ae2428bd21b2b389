"""The keys and values of a step's own tokens, for the attention that takes them along (attention_decode_rows.py).

Knows one key and one value of each sequence and their place in the cache; computes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.turn_heads import HeadNorms, Rope


class NewRows(NamedTuple):
    """Keys and values of a step's tokens, as projected: one for each sequence."""

    k_BGC: Tensor
    v_BGC: Tensor
    norms: HeadNorms | None
    rope: Rope
    slots_B: Tensor
    """int64; -1: written nowhere."""
