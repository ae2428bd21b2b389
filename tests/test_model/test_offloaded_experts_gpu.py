"""Experts in host memory on a GPU: the bits of the resident network, while copies are late and buffers hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_parallel import device_slots
from expert_parallel.copy_engine import CudaCopy, CudaEngine, make_engine
from expert_parallel.host_store import Arena
from expert_parallel.offload_plan import OffloadPlan
from kernels.fetch_bundles import fetch_bundles
from kernels.slot_tables import Places
from moe.model.causal_lm import CausalLM
from moe.model.load_model import load_model
from moe.model.offload_setup import MakeEngine
from tests.compare import assert_same_bits, host_never_waits
from tests.simulated_copies import poison
from tests.step_driver import StepDriver
from tests.tiny_models import VOCAB_SIZE, write_variant

pytestmark = pytest.mark.gpu
E = 8
LATE_CYCLES = 2_000_000  # of the GPU's clock: a millisecond, longer than any product here


class LateEngine(CudaEngine):
    """Poisons a buffer as soon as it may be written, and copies a millisecond later."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CudaCopy:
        with torch.cuda.stream(self.stream):
            for target in targets:
                poison(target)
            torch.cuda._sleep(LATE_CYCLES)
        return super().copy(targets, sources)


def late_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels copy into holds NaN from when they may, and comes a millisecond later: guesses are called off
    before, while and after they come."""

    def fetch(
        places: Places, sources: Sequence[Tensor], targets: Sequence[Tensor], *, before: Places | None = None
    ) -> None:
        kind = "fetch" if before is None else "ahead"
        num = int(places.numbers[0 if before is None else 1])  # waits for this stream alone
        if num and before is not None:
            places.part("ahead_state")[:num].clamp_(min=1)  # begun: nobody gets these places back
        for target in targets:
            for place in places.part(f"{kind}_place")[:num].tolist():
                target[place].view(torch.uint8).fill_(0xFF)
        torch.cuda._sleep(LATE_CYCLES // (1 if before is None else 4))
        fetch_bundles(places, sources, targets, before=before)

    monkeypatch.setattr(device_slots, "fetch_bundles", fetch)


def load(folder: Path, plan: OffloadPlan | None, copies: MakeEngine = make_engine, **options: Any) -> CausalLM:
    sizes = {"max_model_len": 256, "mla_workspace_tokens": 64}
    return load_model(folder, device=torch.device("cuda", 0), offload=plan, copies=copies, **sizes, **options)


def logits_of(model: CausalLM) -> list[Tensor]:
    """A prompt, then single rows, then many rows, one of them at a time again."""
    generator = torch.Generator().manual_seed(5)
    driver = StepDriver(model)
    found: list[Tensor] = []

    def tokens(length: int) -> list[int]:
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()

    found += driver.run(prefill={"a": tokens(40)}).values()
    for token in tokens(4):
        found += driver.run(decode={"a": token}).values()
    names = [f"s{number}" for number in range(20)]
    found += driver.run(prefill={name: tokens(3) for name in names}).values()
    for _ in range(3):
        found += driver.run(decode=dict(zip(names, tokens(20), strict=True))).values()
        found += driver.run(decode={"a": 7}).values()
    return [each.clone() for each in found]


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_bits_of_the_resident_network(tmp_path: Path, variant: str, quantization: str) -> None:
    """C26 on the device: every size of held and passing slots, with copies at once and late."""
    width = {"intermediate_size": 128} if variant == "mixtral" else {"moe_intermediate_size": 128}
    write_variant(tmp_path, variant, hidden_size=128, **width)
    options = {"dtype": torch.bfloat16, "quantization": quantization}
    expected = logits_of(load(tmp_path, None, **options))
    for regime, held, staging in (("auto", 3, 2), ("cache", 2, 1), ("stream", 2, 3), ("cache", 0, 2), ("stream", 7, 1)):
        for copies in (make_engine, LateEngine):
            plan = OffloadPlan(regime, E, held, staging, num_layers=1, bundle_bytes=1, tier="host", host_bytes=1)
            model = load(tmp_path, plan, copies, **options)
            for mine, theirs in zip(logits_of(model), expected, strict=True):
                assert_same_bits(mine, theirs)
            assert model.offload is not None
            torch.cuda.synchronize()
            figures = model.offload.statistics().copies
            assert figures.num_bytes > 0 and 0 < figures.busy_seconds <= figures.span_seconds
            assert figures.stall_seconds >= 0


@pytest.mark.parametrize("variant, quantization", [("qwen3_moe", "none"), ("deepseek_v3", "fp8")])
def test_bits_with_tables_on_the_device_and_late_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, quantization: str
) -> None:
    """C26 and C30: the device decides, copies by kernels are late and their places poisoned."""
    write_variant(tmp_path, variant, hidden_size=128, moe_intermediate_size=128)
    options = {"dtype": torch.bfloat16, "quantization": quantization}
    expected = logits_of(load(tmp_path, None, **options))
    late_fetches(monkeypatch)
    vain = 0
    for held in (1, 2, 5):
        plan = OffloadPlan("cache", E, held, 2, num_layers=1, bundle_bytes=1, tier="host", host_bytes=1)
        model = load(tmp_path, plan, **options)
        assert model.offload is not None and model.offload.on_device is not None
        for mine, theirs in zip(logits_of(model), expected, strict=True):
            assert_same_bits(mine, theirs)
        figures = model.offload.statistics()
        copies = figures.copies
        assert figures.slots.misses > 20 and 0 < copies.busy_seconds <= copies.span_seconds
        assert copies.stall_seconds > 0 and copies.due_seconds > 0
        vain += figures.slots.fetched_in_vain
    assert vain > 0


@pytest.mark.parametrize("held", [2, 4, 7, 23])
def test_layers_that_hold_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """Of three layers with experts: none or one slot of each (the host decides then), one or two, two or three, seven
    or all; every way through them, with copies at once and late."""
    write_variant(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    expected = logits_of(load(tmp_path, None, dtype=torch.bfloat16))
    for regime, late in (("cache", False), ("cache", True), ("auto", False), ("stream", True)):
        if late:
            late_fetches(monkeypatch)
        plan = OffloadPlan(regime, E, held, 2, num_layers=3, bundle_bytes=1, tier="host", host_bytes=1)
        model = load(tmp_path, plan, LateEngine if late else make_engine, dtype=torch.bfloat16)
        assert model.offload is not None and (model.offload.on_device is not None) == (held >= 3)
        counts = [len(each.slots) for each in model.offload.held.values()]
        assert sum(counts) == held and len(set(counts)) == 2
        for mine, theirs in zip(logits_of(model), expected, strict=True):
            assert_same_bits(mine, theirs)
        figures = model.offload.statistics()
        assert figures.copies.num_bytes > 0 and (figures.slots.misses > 0) == (regime != "stream")
        monkeypatch.undo()


def test_a_step_of_few_rows_never_waits_for_the_device(tmp_path: Path) -> None:
    """Two rows of a decode step ask for more slots than a layer has places; what came is known when it is asked for."""
    write_variant(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    plan = OffloadPlan("auto", E, 2, 2, num_layers=1, bundle_bytes=1, tier="host", host_bytes=1)
    model = load(tmp_path, plan, dtype=torch.bfloat16)
    assert model.offload is not None
    driver = StepDriver(model)
    driver.run(prefill={"a": [5, 6, 7], "b": [8]})
    driver.run(decode={"a": 3, "b": 4})  # compiles
    step = driver.plan([("a", [5]), ("b", [6])], num_decode=2)
    with host_never_waits():
        logits = model.forward(step, driver.kv_caches)
    assert torch.isfinite(logits).all() and model.offload.statistics().slots.misses > 0
    model.offload.settle()
    held = [slot for each in model.offload.held.values() for slot in each.slots if slot is not None]
    assert held != [0, 1] * len(model.offload.held)


def test_an_arena_is_pinned_and_let_go() -> None:
    """Copies from it do not wait for the host, and the same memory can be pinned again once the last view is gone."""
    shapes = {"a": ((1 << 20,), torch.float32), "b": ((3, 5), torch.bfloat16)}
    for _ in range(3):
        tensors = Arena(shapes, pin_for=torch.device("cuda", 0)).tensors
        assert tensors["a"].is_pinned() and tensors["b"].is_pinned()
        tensors["a"].fill_(3.0)
        assert tensors["a"].to("cuda", non_blocking=True).sum().item() == 3.0 * (1 << 20)
        del tensors
