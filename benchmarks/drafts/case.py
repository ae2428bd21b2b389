"""What a draft is judged by: the same operands through what is in use and through the draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.replay import Call


@dataclass(frozen=True)
class Case:
    """One shape. `forms`: a rotation of calls for each form, the first of them what is in use, the others drafts.

    Calls at the same place of two rotations take the same operands and return the same tensors, or tuples of them, in
    the same order. `tolerance`: of the largest value, how far a draft may be off; 0: the same bits.
    """

    name: str
    forms: Mapping[str, Sequence[Call]]
    tolerance: float = 0.0
