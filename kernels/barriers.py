"""Barriers in shared memory, by which the warps of a Gluon kernel hand stages to each other. No launcher.

Knows how often who arrives; knows nothing of what lies in a stage.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNTS: gl.constexpr):
    """For each of COUNTS, as many barriers as STAGES, [STAGES, 1]: a round of one ends with so many arrivals. To be
    indexed by stage."""
    made = ()
    for _ in gl.static_range(len(COUNTS)):
        made += (gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),)
    for i in gl.static_range(STAGES):
        for which in gl.static_range(len(COUNTS)):
            mbarrier.init(made[which].index(i), count=COUNTS[which])
    return made
