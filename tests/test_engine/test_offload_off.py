"""Without offload nothing of it is in a step, nor on the device: what it costs is decided while a network is built."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from configs.schema import CacheConfig, Config, EngineConfig, OffloadConfig
from moe.engine.llm import LLM
from moe.engine.request import SamplingParams
from moe.model.causal_lm import CausalLM
from moe.model.experts import Experts
from moe.model.layer import MoELayer

# Files that know of experts in host memory.
OFFLOAD = {
    "chunk_stream",
    "copy_engine",
    "disk_source",
    "held_slots",
    "host_memory",
    "host_store",
    "offload_figures",
    "offload_plan",
    "prefetch",
    "slot_buffer",
    "expert_files",
    "host_experts",
    "offload_setup",
    "offloaded_experts",
    "slot_products",
    "device_slots",
    "slot_places",
    "slot_guesses",
    "slot_tables",
    "fetch_bundles",
}


def files_in_steps(offload: OffloadConfig) -> tuple[set[str], LLM]:
    """Names of the product's files of which a function is called while an engine answers."""
    engine = EngineConfig(device="cpu", max_model_len=128, max_num_seqs=4, max_batched_tokens=64)
    llm = LLM(config=Config(model="demo", engine=engine, cache=CacheConfig(num_blocks=64), offload=offload))
    root = str(Path(__file__).resolve().parents[2])
    found: set[str] = set()

    def see(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            found.add(Path(name).stem)

    sys.setprofile(see)
    try:
        llm.generate(["In the beginning", "And"], SamplingParams(max_tokens=3, ignore_eos=True))
    finally:
        sys.setprofile(None)
    return found, llm


def test_no_function_of_offload_is_called_in_a_step() -> None:
    found, llm = files_in_steps(OffloadConfig())
    with llm:
        assert "layer" in found and "experts" in found, "the profile saw no step"
        assert not found & OFFLOAD, f"called without offload: {sorted(found & OFFLOAD)}"
        network = llm.engine.parts.network
        assert isinstance(network, CausalLM) and network.offload is None
        experts = [block.mlp.experts for block in network.blocks if isinstance(block.mlp, MoELayer)]
        assert experts and all(type(each) is Experts for each in experts)
        assert llm.memory_plan.host_bytes == 0 and llm.stats().offload is None
        planned = llm.engine.parts.forecast
        assert planned is not None and planned.offload is None
        assert llm.memory_plan.weight_bytes == planned.weights.rest + planned.weights.experts


def test_with_offload_the_same_look_finds_it() -> None:
    """Else the test above could not fail."""
    found, llm = files_in_steps(OffloadConfig(regime="stream", slots_per_layer=3))
    with llm:
        assert {"offloaded_experts", "chunk_stream", "slot_buffer", "copy_engine"} <= found
