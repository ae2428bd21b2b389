"""The engine on a GPU with experts in host memory: the answers of one that holds them all, replayed or launched."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import CacheConfig, Config, EngineConfig, OffloadConfig
from moe.engine.llm import LLM
from moe.engine.request import SamplingParams
from tests.test_engine.test_llm_ranks import texts

pytestmark = pytest.mark.gpu

PROMPTS = ["In the beginning", "And", "Blessed are the meek, for they shall", "Thus saith"] * 6
# They end one after another, so that steps of every number of rows come.
PARAMS = [SamplingParams(max_tokens=8 + n, temperature=0.8 * (n % 2), seed=1, ignore_eos=True) for n in range(24)]


def answers(
    model: str, quantization: str, regime: str, *, graphs: bool, **held: float
) -> tuple[list[Any], int, Any, list[int]]:
    """(texts of all prompts, of one prompt alone and of three), graphs that were captured, figures, G of each layer."""
    config = Config(
        model=model,
        quantization=quantization,
        dtype="bfloat16",
        engine=EngineConfig(
            device="cuda", max_batched_tokens=64, max_num_seqs=32, max_model_len=256, cuda_graphs=graphs
        ),
        cache=CacheConfig(num_blocks=256),
        offload=OffloadConfig() if regime == "off" else OffloadConfig(regime=regime, **held),  # pyright: ignore[reportArgumentType]
    )
    with LLM(config=config) as llm:
        found = [texts(llm.generate(PROMPTS[:n], PARAMS[:n])) for n in (24, 1, 3)]
        num_graphs = 0 if llm.engine.graphs is None else llm.engine.graphs.num_graphs
        offload = llm.engine.parts.offload
        counts = [] if offload is None else [len(each.slots) for each in offload.held.values()]
        return found, num_graphs, llm.stats().offload, counts


@pytest.mark.parametrize(("model", "quantization"), [("demo", "none"), ("demo-deepseek", "fp8")])
def test_answers_are_those_of_the_resident_engine(model: str, quantization: str) -> None:
    """Steps of few rows are replayed, prompts and steps of many rows are not, in turns."""
    expected, num_graphs, *_ = answers(model, quantization, "off", graphs=True)
    assert num_graphs > 0
    for regime, graphs in (("auto", True), ("cache", True), ("cache", False), ("stream", True)):
        found, num_graphs, figures, _ = answers(model, quantization, regime, graphs=graphs, slots_per_layer=3)
        assert found == expected, (regime, graphs)
        assert (num_graphs > 0) == (graphs and regime != "stream")
        assert figures.copies.num_bytes > 0 and (figures.slots.hits > 0) == (regime != "stream")


def test_layers_of_one_and_two_slots_in_graphs() -> None:
    """A budget of bytes: the demo's six layers of eight experts of 72 KiB hold nine, beside two buffers of seven."""
    expected, *_ = answers("demo", "none", "off", graphs=True)
    for graphs in (True, False):
        budget = (9 + 2 * 7) * 72 / 2**20
        found, num_graphs, figures, counts = answers("demo", "none", "cache", graphs=graphs, gpu_gb=budget)
        assert found == expected and counts == [1, 2, 1, 2, 1, 2] and (num_graphs > 0) == graphs
        assert figures.slots.hits > 0 and figures.slots.misses > 0


def test_steps_are_captured_anew_after_all_graphs_were_freed() -> None:
    """The memory of graphs that are gone is not taken again: a pool nobody holds was an internal fault of torch."""
    with LLM("demo", device="cuda", num_blocks=256, max_num_seqs=4) as llm:
        expected = texts(llm.generate(PROMPTS[:3], PARAMS[:3]))
        graphs = llm.engine.graphs
        assert graphs is not None and graphs.num_graphs > 0
        graphs.close()
        assert graphs.num_graphs == 0
        assert texts(llm.generate(PROMPTS[:3], PARAMS[:3])) == expected and graphs.num_graphs > 0
