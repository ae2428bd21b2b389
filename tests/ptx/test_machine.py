"""The machine of PTX notices what is wrong: an instruction taken out of a program that is right is a fault."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.grouped_gemm_specialized import launch_specialized
from kernels.linear import linear_triton
from kernels.tiles import TileConfig
from tests.aot import aot
from tests.ptx import program as module
from tests.ptx.launch import Hopper
from tests.ptx.machine import Code, Machine
from tests.ptx.memory import Fault, Global
from tests.ptx.program import Instruction, Program, parse

pytestmark = aot


@pytest.fixture(scope="module")
def hopper() -> Hopper:
    return Hopper()


def test_worked_examples():
    assert doctest.testmod(module).failed == 0


HANDS_OVER = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry hands_over(.param .u64 .ptr .global .align 1 hands_over_param_0)
.reqntid 64
{
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.b64 %rd1, [hands_over_param_0];
    mov.u32 %r1, %tid.x;
    mad.lo.s32 %r2, %r1, 4, global_smem;
    st.shared.b32 [%r2], %r1;
    bar.sync 0;
    xor.b32 %r3, %r1, 63;
    mad.lo.s32 %r4, %r3, 4, global_smem;
    ld.shared.b32 %r5, [%r4];
    mad.wide.s32 %rd2, %r1, 4, %rd1;
    st.global.b32 [%rd2], %r5;
    ret;
}
"""


def without(index: int, wanted: Callable[[Instruction], bool], program: Program) -> Program:
    """Without the so-manieth of such instructions, and without what repeats it."""
    place = program.find(wanted)[index]
    if program.instructions[place].name.startswith("mbarrier.try_wait"):
        program = program.changed(place + 1, None)
    return program.changed(place, None)


def is_fence(instruction: Instruction) -> bool:
    return instruction.name.startswith("fence.proxy.async")


def is_wait(instruction: Instruction) -> bool:
    return instruction.name.startswith("mbarrier.try_wait")


def is_arrival(instruction: Instruction) -> bool:
    return instruction.name.startswith("mbarrier.arrive.shared")


def run_few_rows(hopper: Hopper, change: Callable[[Program], Program]) -> None:
    x_MK, w_NK = torch.randn(3, 1544).bfloat16(), torch.randn(150, 1544).bfloat16()
    with hopper.posing(change=change):
        linear_triton(x_MK, w_NK)


@pytest.mark.parametrize(
    ("index", "wanted", "fault"),
    [
        pytest.param(0, is_fence, "no fence has shown", id="fence behind the barriers"),
        pytest.param(1, is_fence, "multiplies what warp", id="fence behind the rows"),
        pytest.param(0, is_wait, "without having waited", id="wait for weights"),
        pytest.param(0, lambda one: one.name.startswith("cp.async.wait_group"), "a copy of warp", id="wait for copies"),
        pytest.param(0, lambda one: one.name.startswith("wgmma.wait_group"), "may still read", id="wait for products"),
        pytest.param(-1, lambda one: one.name.startswith("mbarrier.init"), "no barrier", id="barrier"),
    ],
)
def test_what_is_missing_is_noticed(hopper, index, wanted, fault):
    with pytest.raises(Fault, match=fault):
        run_few_rows(hopper, partial(without, index, wanted))


@pytest.mark.parametrize(
    ("index", "wanted", "fault"),
    [
        pytest.param(1, is_wait, "may still read", id="wait for room"),
        pytest.param(3, is_wait, "overwrites what copies", id="wait for weights"),
        pytest.param(0, is_arrival, "hangs", id="arrival"),
    ],
)
def test_what_is_missing_between_groups_of_warps_is_noticed(hopper, index, wanted, fault):
    """Stages are filled by a group of their own, which is told when one may be filled again."""
    x_XD, w_SND = torch.randn(3, 520).bfloat16(), torch.randn(2, 72, 520).bfloat16()
    tile, y_RN = TileConfig(128, 128, 64, 4, 4, "specialized"), torch.empty(3, 72, dtype=torch.bfloat16)
    offsets_S1 = torch.tensor([0, 3, 3], dtype=torch.int32)
    with pytest.raises(Fault, match=fault), hopper.posing(change=partial(without, index, wanted)):
        launch_specialized(x_XD, w_SND, offsets_S1, None, y_RN, tile, swiglu=False, group_m=8)


def test_a_store_out_of_bounds_is_noticed(hopper):
    def for_all_rows(program: Program) -> Program:
        index = program.find(lambda one: one.name.startswith("st.global"))[-1]
        return program.changed(index, replace(program.instructions[index], predicate=None))

    with pytest.raises(Fault, match="global memory: 2 bytes at"):
        run_few_rows(hopper, for_all_rows)


def test_a_missing_barrier_of_threads_is_noticed():
    """Worked by hand: two warps hand a value over, with a barrier between and without."""
    hands_over = parse(HANDS_OVER)
    out = torch.zeros(64, dtype=torch.int32)
    for program, fault in ((hands_over, None), (without(0, lambda one: one.name == "bar.sync", hands_over), "reads")):
        given = {program.params[0]: out.data_ptr()}
        machine = Machine(Code(program), given, Global([out]), {}, (1, 1, 1), 256)
        if fault is None:
            machine.run(resident=1, chance=random.Random(0))
            assert out.tolist() == list(range(63, -1, -1))
        else:
            with pytest.raises(Fault, match=fault):
                machine.run(resident=1, chance=random.Random(0))
