"""Runs a kernel's programs: warps in turns that chance draws, so many programs at once, copies that end at any time.

What it knows: warps whose lanes part and meet again, warp specialisation, barriers of all kinds, and that a program
whose warps all wait for ever hangs. What it does not model: time, the order in which other programs see global memory
(they are interleaved between instructions that wait, and that is all), what the launch before has not finished
(griddepcontrol does nothing), registers and their number, `wgmma.fence`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.ptx.arithmetic import decode_arithmetic
from tests.ptx.memory import Barrier, Clocks, Fault, Global, Released, Shared
from tests.ptx.program import Instruction, Program
from tests.ptx.registers import Lanes, Names
from tests.ptx.tensor_core import Products, decode_tensor_core
from tests.ptx.transfers import Copies, Descriptor, decode_transfer

Run = Callable[[Any], Any]
"""An instruction: takes the warp; True: others are to have a turn."""

_PATIENCE = 400
"""Rounds in which nothing happens before a program is said to hang."""

_NO_EFFECT = ("setmaxnreg", "griddepcontrol", "prefetch", "bar.warp.sync", "membar", "nop", "wgmma.fence", "nanosleep")


class Code:
    """A program with a closure for every instruction: made once, run often."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = Names(program)
        self.steps = [self._decode(instruction) for instruction in program.instructions]
        self.num_barriers = len(program.find(lambda one: one.name.startswith("mbarrier.init")))

    def _decode(self, instruction: Instruction) -> Run:
        head = instruction.name.split(".")[0]
        predicate = None if instruction.predicate is None else self.names.slots[instruction.predicate]
        if head in ("bra", "ret", "exit"):
            target = self.program.labels[instruction.args[0]] if head == "bra" else len(self.program.instructions)
            return _jump(target, predicate, instruction.negated)
        if head == "brx":
            targets = [self.program.labels[label] for label in self.program.tables[instruction.args[1]]]
            return _jump_by_table(self.names.reader(instruction.args[0], "u32"), targets)
        if instruction.name.startswith(_NO_EFFECT) or re.match(r"fence\.(?!proxy\.async|mbarrier)", instruction.name):
            return lambda warp: None
        if instruction.name.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")):
            step = _synchronise(self.names, instruction.args, self.program.num_threads)
        else:
            decoders = (decode_arithmetic, decode_transfer, decode_tensor_core)
            step = next((made for decode in decoders if (made := decode(self.names, instruction)) is not None), None)
            assert step is not None, f"an instruction that is not known: {instruction}"
        if predicate is None:
            return lambda warp: step(warp, warp.mask)
        return _guarded(step, predicate, instruction.negated)


def _guarded(step: Callable[[Any, Lanes | None], Any], predicate: int, negated: bool) -> Run:
    def run(warp: Any) -> Any:
        mask = warp.registers[predicate]
        if negated:
            mask = ~mask
        if warp.mask is not None:
            mask = mask & warp.mask
        lanes = np.count_nonzero(mask)
        return step(warp, None if lanes == 32 else mask) if lanes else None

    return run


def _jump(target: int, predicate: int | None, negated: bool) -> Run:
    def always(warp: Any) -> None:
        warp.pc = target

    def where(warp: Any) -> None:
        mask = warp.registers[predicate]
        if negated:
            mask = ~mask
        lanes = np.count_nonzero(mask if warp.mask is None else mask & warp.mask)
        if lanes == (32 if warp.mask is None else np.count_nonzero(warp.mask)):
            warp.pc = target
        elif lanes:
            warp.part(mask, target)

    return always if predicate is None else where


def _jump_by_table(read: Any, targets: Sequence[int]) -> Run:
    def run(warp: Any) -> None:
        index = read(warp)
        if (index != index[0]).any() or warp.mask is not None:
            raise Fault("a table's target differs among lanes")
        warp.pc = targets[int(index[0])]

    return run


def _synchronise(names: Names, args: tuple[str, ...], num_threads: int) -> Callable[[Any, Lanes | None], bool]:
    which, threads = names.reader(args[0], "u32"), int(args[1]) if len(args) > 1 else num_threads

    def sync(warp: Any, mask: Lanes | None) -> bool:
        if mask is not None:
            raise Fault("some lanes of a warp wait for a barrier of all")
        barrier = warp.cta.named.setdefault(int(which(warp)[0]), NamedBarrier())
        if not barrier.passes(warp, threads):
            warp.pc -= 1
        return True

    return sync


class NamedBarrier:
    """A barrier of so many threads, by number: who came for this round, and who may go on from the last."""

    def __init__(self) -> None:
        self.threads = 0
        self.waiting: list[Warp] = []
        self.released: set[int] = set()

    def passes(self, warp: Warp, threads: int) -> bool:
        if warp.index in self.released:
            self.released.remove(warp.index)
            return True
        if warp not in self.waiting:
            if self.waiting and threads != self.threads:
                raise Fault(f"a barrier of {self.threads} threads and of {threads}")
            self.threads = threads
            self.waiting.append(warp)
            if len(self.waiting) * 32 == threads:
                self._release(warp.cta.clocks)
                warp.cta.happened()
        return False

    def _release(self, clocks: Clocks) -> None:
        who = [warp.index for warp in self.waiting]
        told = Released(clocks.seen[who].max(0), clocks.fenced[who].max(0))
        for index in who:
            clocks.learn(index, told)
            clocks.seen[index, index] += 1
        self.released.update(who)
        self.waiting.clear()


class Warp:
    """32 lanes. `mask`: those that run now, None all; `others`: where the rest stands. Who is behind runs first,
    so that lanes that parted meet again."""

    def __init__(self, cta: Cta, index: int, code: Code) -> None:
        self.cta, self.index, self.code = cta, index, code
        self.lanes = np.arange(32, dtype=np.uint32)
        self.threads = self.lanes + np.uint32(32 * index)
        self.registers = code.names.empty()
        self.copies, self.products = Copies(self), Products(self)
        self.pc = 0
        self.mask: Lanes | None = None
        self.others: list[tuple[int, Lanes]] = []
        self.done = False
        self._clock = 0

    def clock(self) -> Lanes:
        """Runs on whenever it is read."""
        self._clock += 100
        return np.full(32, self._clock, np.uint32)

    def part(self, mask: Lanes, target: int) -> None:
        own = np.ones(32, np.bool_) if self.mask is None else self.mask
        self.others.append((target, own & mask))
        self.mask = own & ~mask

    def _meet(self) -> None:
        places = [*self.others, (self.pc, self.mask)]
        self.pc = min(place for place, _ in places)
        self.mask = np.logical_or.reduce([mask for place, mask in places if place == self.pc])
        self.others = [(place, mask) for place, mask in places if place != self.pc]
        if not self.others and self.mask.all():
            self.mask = None

    def run(self) -> None:
        """Until others are to have a turn, or to the end."""
        steps, end = self.code.steps, len(self.code.steps)
        try:
            while True:
                if self.others:
                    self._meet()
                if self.pc >= end:
                    self.done = True
                    return self.cta.happened()
                self.pc += 1
                if steps[self.pc - 1](self):
                    return None
        except Fault as fault:
            fault.add_note(f"{self.where()}: {self.code.program.instructions[self.pc - 1]}")
            raise

    def where(self) -> str:
        place = ", ".join(str(int(part[0])) for part in self.cta.place)
        return f"{self.code.program.name}, program ({place}), warp {self.index}, instruction {self.pc - 1}"


class Cta:
    """One program: its warps, shared memory and barriers. `flights`: copies under way, ended by calling them."""

    def __init__(self, machine: Machine, place: tuple[int, int, int]) -> None:
        code = machine.code
        self.params, self.memory, self.descriptors = machine.params, machine.memory, machine.descriptors
        self.place = [np.full(32, part, np.uint32) for part in place]
        self.size = [np.full(32, part, np.uint32) for part in machine.grid]
        num_warps = code.program.num_threads // 32
        self.clocks = Clocks(num_warps, code.num_barriers)
        self.shared = Shared(machine.shared_bytes, self.clocks)
        self.named: dict[int, NamedBarrier] = {}
        self.flights: list[Callable[[], None]] = []
        self._barriers: dict[int, Barrier] = {}
        self._dropped: dict[int, Barrier] = {}
        self._machine = machine
        self.warps = [Warp(self, index, code) for index in range(num_warps)]

    def happened(self, something: bool = True) -> None:
        """What others may have waited for."""
        if something:
            self._machine.quiet = 0

    def make_barrier(self, warp: Warp, address: int, count: int) -> None:
        if address in self._barriers:
            raise Fault("a barrier is made where there is one")
        self.shared.granules(np.array([address]), 8)
        before = self._dropped.pop(address, None)
        index = len(self._barriers) + len(self._dropped) if before is None else before.index
        rounds = 0 if before is None else before.rounds
        made_at = self.clocks.now(warp.index)
        self._barriers[address] = Barrier(index, count, rounds, warp.index, made_at)

    def drop_barrier(self, address: int) -> None:
        self._dropped[address] = self._barriers.pop(address)

    def barrier(self, warp: Warp, address: int) -> Barrier:
        found = self._barriers.get(address)
        if found is None:
            raise Fault("there is no barrier")
        if self.clocks.seen[warp.index, found.made_by] < found.made_at:
            raise Fault("a barrier whose making this warp has not seen")
        return found

    def end_flights(self, chance: random.Random) -> None:
        """Some of the copies under way, in any order."""
        for _ in range(chance.randrange(len(self.flights) + 1) if self.flights else 0):
            self.flights.pop(chance.randrange(len(self.flights)))()
            self.happened()


class Machine:
    """Runs a grid of one kernel."""

    def __init__(
        self,
        code: Code,
        params: Mapping[str, int | float],
        memory: Global,
        descriptors: Mapping[int, Descriptor],
        grid: tuple[int, int, int],
        shared_bytes: int,
    ) -> None:
        self.code, self.params, self.memory, self.descriptors = code, params, memory, descriptors
        self.grid, self.shared_bytes = grid, shared_bytes
        self.quiet = 0
        """Rounds in which nothing happened."""

    def run(self, *, resident: int, chance: random.Random) -> None:
        """`resident`: how many programs there are at a time; who waits for a later one hangs."""
        waiting = list(np.ndindex(*self.grid))
        chance.shuffle(waiting)
        running: list[Cta] = []
        with np.errstate(all="ignore"):
            while waiting or running:
                while waiting and len(running) < resident:
                    running.append(Cta(self, waiting.pop()))
                self.quiet += 1
                for cta in running:
                    self._round(cta, chance)
                running = [cta for cta in running if not all(warp.done for warp in cta.warps)]
                if self.quiet > _PATIENCE:
                    warps = [warp for cta in running for warp in cta.warps if not warp.done]
                    raise Fault("hangs:\n" + "\n".join(f"  {warp.where()}" for warp in warps))

    def _round(self, cta: Cta, chance: random.Random) -> None:
        cta.end_flights(chance)
        alive = [warp for warp in cta.warps if not warp.done]
        for warp in chance.sample(alive, len(alive)):
            if chance.random() < 0.7:
                warp.run()
        if all(warp.done for warp in cta.warps) and cta.flights:
            raise Fault(f"{cta.warps[0].where()}: it ends while copies into its memory are under way")
