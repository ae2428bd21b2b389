"""Experts in host memory against the same network with all of them at hand: the same bits, whatever the copies do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_parallel import device_slots
from expert_parallel.copy_engine import CopyEngine, ImmediateEngine, make_engine
from expert_parallel.device_slots import DeviceSlots
from expert_parallel.disk_source import DiskSource
from expert_parallel.dispatcher import ExpertInput
from expert_parallel.offload_plan import OffloadPlan
from kernels.fetch_bundles import fetch_bundles_reference, num_pieces
from kernels.slot_tables import Places
from moe.model.causal_lm import CausalLM
from moe.model.load_model import load_model
from moe.model.offload_setup import MakeEngine
from moe.model.offloaded_experts import Following
from tests.compare import assert_same_bits
from tests.simulated_copies import SimulatedEngine, poison
from tests.step_driver import StepDriver
from tests.tiny_models import VARIANTS, VOCAB_SIZE, write_variant

CPU = torch.device("cpu")
E = 8  # of every tiny model
REGIMES = ("auto", "cache", "stream")


def load(folder: Path, plan: OffloadPlan | None = None, copies: MakeEngine = make_engine, **options: Any) -> CausalLM:
    options = {"dtype": torch.float32, "device": CPU, "max_model_len": 256, "mla_workspace_tokens": 64} | options
    return load_model(folder, offload=plan, copies=copies, **options)


def plan_of(regime: str, held: int, staging: int) -> OffloadPlan:
    """Of every layer. As far as a network looks at it: sizes are those of another test."""
    return OffloadPlan(regime, E, held, staging, num_layers=1, bundle_bytes=1, tier="host", host_bytes=1)


def simulated(seed: int = 0, most_late: int = 6) -> MakeEngine:
    return lambda device: SimulatedEngine(most_late, seed)


def engine_of(model: CausalLM) -> CopyEngine:
    assert model.offload is not None
    return model.offload.engine


def poison_buffers(model: CausalLM) -> None:
    assert model.offload is not None
    held = [held.buffer for held in model.offload.held.values()]
    for buffer in [*held, *model.offload.staging]:
        for tensor in buffer.tensors:
            poison(tensor)
    for each in model.offload.held.values():  # what was poisoned is fetched anew
        each.forget(range(E))


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def all_logits(model: CausalLM) -> list[Tensor]:
    """Prompts, then steps of one or two rows, then both, then one row: every way through the layers."""
    driver = StepDriver(model)
    found = [*driver.run(prefill={"a": tokens_of(11, 1), "b": tokens_of(3, 2)}).values()]
    for step in range(3):
        rows = {"a": 3 + step} if step % 2 else {"a": 40 + step, "b": 90 + step}
        found += driver.run(decode=rows).values()
    found += driver.run(decode={"a": 5, "b": 17}, prefill={"c": tokens_of(5, 3)}).values()
    for step in range(3):
        found += driver.run(decode={"c": 200 + step}).values()
    return found


def assert_all_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_of_every_family_are_those_of_the_resident_model(tmp_path: Path, variant: str) -> None:
    """Three slots held and buffers of two, which do not divide the five others."""
    write_variant(tmp_path, variant)
    expected = all_logits(load(tmp_path))
    for regime in REGIMES:
        model = load(tmp_path, plan_of(regime, held=3, staging=2), simulated())
        assert_all_same(all_logits(model), expected)
        engine = engine_of(model)
        assert isinstance(engine, SimulatedEngine) and engine.num_early, "no copy was late, so nothing was tried"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_fp8_with_their_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    """Widths of more than one block, with edges; also with the engine that the product has on the CPU."""
    write_variant(tmp_path, "qwen3_moe", hidden_size=192, moe_intermediate_size=128)
    options = {"quantization": "fp8", "dtype": dtype}
    expected = all_logits(load(tmp_path, **options))
    for regime, copies in (("auto", simulated()), ("stream", make_engine)):
        assert_all_same(all_logits(load(tmp_path, plan_of(regime, 3, 2), copies, **options)), expected)


@pytest.mark.parametrize("held, staging", [(0, 1), (0, 8), (7, 1), (7, 8)])
def test_every_size_of_buffers(tmp_path: Path, held: int, staging: int) -> None:
    write_variant(tmp_path, "mixtral")
    expected = all_logits(load(tmp_path))
    for regime in REGIMES:
        assert_all_same(all_logits(load(tmp_path, plan_of(regime, held, staging), simulated())), expected)


@pytest.mark.parametrize("held", [2, 4, 7, 23])
def test_layers_that_hold_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """Of three layers with experts: none or one slot of each (the host decides then, whoever could), one or two, two or
    three, seven or all; with copies that are late, and with tables on the device and guesses half done."""
    write_variant(tmp_path, "qwen3_moe")
    expected = all_logits(load(tmp_path))
    by_kernels: MakeEngine = lambda device: KernelEngine()  # noqa: E731
    for regime in REGIMES:
        for copies in (simulated(held), by_kernels):
            if copies is by_kernels:
                LateFetches(monkeypatch, held)
            model = load(tmp_path, replace(plan_of(regime, 1, 2), num_held=held, num_layers=3), copies)
            offload = model.offload
            assert offload is not None and (offload.on_device is not None) == (copies is by_kernels and held >= 3)
            counts = [len(each.slots) for each in offload.held.values()]
            assert sum(counts) == held and len(set(counts)) == 2
            poison_buffers(model)
            offload.fill()
            assert_all_same(all_logits(model), expected)
            offload.settle()
            assert counts == [len(each.slots) for each in offload.held.values()]
            monkeypatch.undo()


@pytest.mark.parametrize(
    ("variant", "options", "quantization"),
    [
        ("deepseek_v3", {"shards": 3}, "none"),
        ("mixtral", {"layout": "stacked"}, "none"),
        ("qwen3_moe", {"hidden_size": 192, "moe_intermediate_size": 128}, "fp8"),  # made of other numbers
        ("qwen3_moe", {"hidden_size": 192, "moe_intermediate_size": 128, "fp8": True}, "auto"),  # stored so
    ],
)
def test_experts_that_stay_on_disk(tmp_path: Path, variant: str, options: dict[str, Any], quantization: str) -> None:
    """Room for seven bundles of the whole network in host memory: nearly all are read again and again."""
    write_variant(tmp_path, variant, **options)
    resident = load(tmp_path, quantization=quantization)
    expected = all_logits(resident)
    layer = resident.config.layers_with_experts[0]
    whole = [t for name, t in resident.targets().items() if name.startswith(f"layers.{layer}.moe.experts.")]
    bundle_bytes = sum(tensor[0].nbytes for tensor in whole)
    for regime in ("cache", "stream"):
        plan = replace(plan_of(regime, held=3, staging=2), tier="disk", host_bytes=7 * bundle_bytes)
        model = load(tmp_path, plan, simulated(), quantization=quantization)
        assert not any(".experts." in name for name in model.targets())
        assert_all_same(all_logits(model), expected)
        assert model.offload is not None and model.offload.host_bytes < 7 * bundle_bytes + 8192
        source = model.offload.host.source
        assert isinstance(source, DiskSource) and source.reads > 30
    with pytest.raises(ValueError, match=r"offload\.host_gb leaves this rank \d+ bytes, which hold 4 experts of"):
        load(tmp_path, replace(plan, host_bytes=5 * bundle_bytes - 1), quantization=quantization)


class WrongFollowing(Following):
    """Guesses nothing but experts that will not be asked for, as far as it can know: those that the gate ranks last."""

    def guess(self, inputs: ExpertInput) -> Tensor | None:
        ids_XK = super().guess(inputs)
        if self.held.buffer.engine.kernels_read_host and ids_XK is not None:
            ids = [expert for expert in range(E) if expert not in ids_XK]
            ids_XK = torch.tensor([(ids * E)[: ids_XK.numel()]], dtype=torch.int32) if ids else None
        return ids_XK

    def look_ahead(self, expert_ids: Sequence[int]) -> None:
        super().look_ahead([expert for expert in range(E) if expert not in expert_ids])


def test_C26_C30_fifty_runs_with_late_copies_poisoned_slots_and_wrong_guesses(tmp_path: Path) -> None:
    """Two slots of eight experts: nearly every step asks for more than are held, so the rest comes in rounds. What a
    guess is worth differs from run to run, what is computed does not."""
    write_variant(tmp_path, "qwen3_moe")
    expected = all_logits(load(tmp_path))
    chance = random.Random(26)
    num_early = num_held_up = num_in_vain = 0
    for run in range(50):
        plan = replace(plan_of("cache" if run % 4 else "auto", held=2, staging=chance.randint(1, 3)))
        model = load(tmp_path, plan, simulated(run, chance.choice([0, 3, 12, 60])))
        assert model.offload is not None
        if run % 2:
            for each in model.offload.experts.values():
                if each.following is not None:
                    each.following.__class__ = WrongFollowing
        poison_buffers(model)
        assert_all_same(all_logits(model), expected)
        engine = engine_of(model)
        assert isinstance(engine, SimulatedEngine)
        num_early += engine.num_early
        num_held_up += engine.num_held_up
        num_in_vain += model.offload.statistics().slots.fetched_in_vain
    assert num_early > 500 and num_held_up > 200 and num_in_vain > 50, (num_early, num_held_up, num_in_vain)


class KernelEngine(ImmediateEngine):
    """The cache way decides as on a GPU, by the definitions of its kernels."""

    kernels_read_host = True


class LateFetches:
    """Copies of guesses go on until somebody waits for them: by then some are over, some half done and some not begun,
    and their places hold NaN. In a place that a call fetches to is NaN before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_called_off = self.num_half = 0
        self._pending: dict[int, tuple[Places, Sequence[Tensor], Sequence[Tensor]]] = {}
        monkeypatch.setattr(device_slots, "fetch_bundles", self.fetch)
        join = DeviceSlots._join

        def late_join(slots: DeviceSlots, mine: Any) -> None:
            join(slots, mine)
            self.land(mine.places)

        monkeypatch.setattr(DeviceSlots, "_join", late_join)

    def fetch(
        self, places: Places, sources: Sequence[Tensor], targets: Sequence[Tensor], *, before: Places | None = None
    ) -> None:
        kind, num = ("fetch", int(places.numbers[0])) if before is None else ("ahead", int(places.numbers[1]))
        to = places.part(f"{kind}_place")[:num].tolist()
        if before is None:
            poison_rows(targets, to)
            fetch_bundles_reference(places, sources, targets)
            return
        begun = self.random.randint(0, num)
        poison_rows(targets, to[:begun])
        places.part("ahead_state")[:begun] = 1
        places.part("ahead_pieces")[:begun] = torch.tensor([self.random.randint(0, 2) for _ in range(begun)])
        over = [at for at in range(begun) if places.part("ahead_pieces")[at] >= num_pieces(targets)]
        copy_listed(places, sources, targets, over)
        self._pending[id(places)] = (places, sources, targets)

    def land(self, places: Places) -> None:
        """What was not called off comes; of what was, a place that was begun keeps its NaN."""
        found = self._pending.pop(id(places), None)
        if found is not None:
            state = places.part("ahead_state")[: int(places.numbers[1])].tolist()
            pieces = places.part("ahead_pieces").tolist()
            self.num_called_off += state.count(2)
            self.num_half += sum(each == 2 and 0 < pieces[at] < num_pieces(found[2]) for at, each in enumerate(state))
            copy_listed(*found, [at for at, each in enumerate(state) if each != 2])


def copy_listed(places: Places, sources: Sequence[Tensor], targets: Sequence[Tensor], which: Sequence[int]) -> None:
    """Those of the list of guesses."""
    for source, target in zip(sources, targets):
        for at in which:
            target[places.part("ahead_place")[at]] = source[places.part("ahead_row")[at]]


def poison_rows(targets: Sequence[Tensor], rows: Sequence[int]) -> None:
    """NaN in bf16, fp32 and e4m3 alike, whatever integers these are seen as."""
    for target in targets:
        for row in rows:
            target[row].view(torch.uint8).fill_(0xFF)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_on_the_device_give_the_answers_of_the_resident_model(tmp_path: Path, variant: str) -> None:
    write_variant(tmp_path, variant)
    expected = all_logits(load(tmp_path))
    for regime, held in (("cache", 3), ("auto", 2)):
        model = load(tmp_path, plan_of(regime, held, staging=2), lambda device: KernelEngine())
        assert model.offload is not None and model.offload.on_device is not None
        assert_all_same(all_logits(model), expected)
        assert model.offload.statistics().slots.hits > 3


def test_C26_C30_tables_on_the_device_late_copies_and_wrong_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to six places of eight experts, every third run with guesses that are wrong; most copies of guesses are half
    done when they are called off or waited for."""
    write_variant(tmp_path, "qwen3_moe")
    expected = all_logits(load(tmp_path))
    num_called_off = num_half = 0
    for run in range(24):
        late = LateFetches(monkeypatch, run)
        model = load(tmp_path, plan_of("cache" if run % 4 else "auto", 1 + run % 6, 2), lambda device: KernelEngine())
        assert model.offload is not None
        if run % 3 == 0:
            for each in model.offload.experts.values():
                if each.following is not None:
                    each.following.__class__ = WrongFollowing
        assert_all_same(all_logits(model), expected)
        num_called_off += late.num_called_off
        num_half += late.num_half
        monkeypatch.undo()
    assert num_called_off > 100 and num_half > 15, (num_called_off, num_half)


def test_what_a_slot_held_is_forgotten_when_another_expert_comes_behind_it(tmp_path: Path) -> None:
    """Bytes of two experts change places in host memory, as moves do it: results follow, in both ways."""
    write_variant(tmp_path, "qwen3_moe")
    for regime, copies in (("cache", simulated()), ("stream", simulated()), ("auto", lambda device: KernelEngine())):
        changed = load(tmp_path)
        model = load(tmp_path, plan_of(regime, 3, 2), copies)
        all_logits(model)
        assert model.offload is not None
        engine_of(model).drain()
        for network in (changed, model):
            for name, tensor in network.targets().items():
                if ".experts." in name:
                    tensor[[0, 5]] = tensor[[5, 0]]
        for layer, experts in model.layout.experts.items():
            others = [experts[slot] if slot not in (0, 5) else None for slot in range(E)]
            model.offload.place(layer, others, experts)
        assert_all_same(all_logits(model), all_logits(changed))


def test_steps_in_which_the_device_decides_may_be_captured(tmp_path: Path) -> None:
    """Fewer rows than slots, and never where the host decides or all slots stream."""
    write_variant(tmp_path, "mixtral")

    def captured(regime: str, held: int, copies: MakeEngine) -> list[bool]:
        offload = load(tmp_path, plan_of(regime, held, 2), copies).offload
        assert offload is not None
        return [offload.captures(num_rows) for num_rows in (1, E - 1, E)]

    by_kernels: MakeEngine = lambda device: KernelEngine()  # noqa: E731
    for regime in ("auto", "cache"):
        assert captured(regime, 3, by_kernels) == [True, True, False]
    assert not any(
        captured("stream", 3, by_kernels) + captured("cache", 0, by_kernels) + captured("auto", 3, make_engine)
    )


def test_figures_add_up(tmp_path: Path) -> None:
    """Every step asks each sparse layer for the slots that have rows: each is a hit or a miss, each miss a copy."""
    write_variant(tmp_path, "mixtral")
    model = load(tmp_path, plan_of("cache", 4, 2))
    assert model.offload is not None
    driver = StepDriver(model)
    before = model.offload.statistics().as_dict()
    assert before["num_bytes"] == before["hits"] == 0 and before["hit_rate"] is None
    for token in range(20):
        driver.run(decode={"a": token})
    found = model.offload.statistics().as_dict()
    layers, top_k = len(model.config.layers_with_experts), model.config.moe.rule.top_k
    assert found["hits"] + found["misses"] == 20 * layers * top_k
    assert found["hit_rate"] == found["hits"] / (20 * layers * top_k)
    bundle = sum(t[0].nbytes for name, t in model.targets().items() if name.startswith("layers.0.moe.experts."))
    fetched_ahead = found["num_bytes"] // bundle - found["misses"]
    assert found["num_bytes"] % bundle == 0 and fetched_ahead >= found["fetched_and_used"] + found["fetched_in_vain"]
    assert 0 < found["guessed_right"] <= found["guessed"] == 20 * (layers - 1) * top_k
