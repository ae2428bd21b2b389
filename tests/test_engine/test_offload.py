"""The engine with experts in host memory: the answers of one that holds them all, and what it tells of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import moe.engine.balance as balance_module
from configs.schema import BalanceConfig, CacheConfig, Config, EngineConfig, OffloadConfig, ParallelConfig
from moe.batch.report import JobReport
from moe.engine.llm import LLM
from moe.engine.request import SamplingParams
from moe.model import host_experts
from tests.ranks import run_ranks
from tests.test_engine.test_balance_ranks import EVERY_5, anywhere
from tests.test_engine.test_llm_ranks import as_torchrun, free_port, texts

PROMPTS = [
    "In the beginning God created the heaven",
    "In the beginning",
    "And",
    "Thus saith the LORD, In the beginning",
]
PARAMS = [SamplingParams(max_tokens=n, temperature=0.8 * (n % 2), seed=1, ignore_eos=True) for n in (17, 2, 6, 11)]


def config(model: str, offload: OffloadConfig, *, quantization: str = "auto", **balance: Any) -> Config:
    """Prompts in chunks, some of which share a prefix, and sequences that give way to others."""
    return Config(
        model=model,
        quantization=quantization,
        engine=EngineConfig(device="cpu", max_batched_tokens=16, max_num_seqs=3, force_preempt_every=7),
        cache=CacheConfig(num_blocks=32, block_size=4),
        parallel=ParallelConfig(timeout_s=60),
        balance=BalanceConfig(**balance),
        offload=offload,
    )


OFF = OffloadConfig()
HELD_3: dict[str, Any] = {"slots_per_layer": 3}


@cache
def resident(model: str, quantization: str = "auto") -> list[Any]:
    with LLM(config=config(model, OFF, quantization=quantization)) as llm:
        stats = llm.stats()
        assert stats.offload is None and llm.engine.parts.offload is None
        return texts(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("model", "regime", "quantization"),
    [
        ("demo", "auto", "auto"),
        ("demo", "stream", "fp8"),
        ("demo-deepseek", "cache", "auto"),
        ("demo-deepseek", "auto", "fp8"),
    ],
)
def test_answers_are_those_of_the_resident_engine(model: str, regime: str, quantization: str) -> None:
    offload = OffloadConfig(regime=regime, **HELD_3)
    with LLM(config=config(model, offload, quantization=quantization)) as llm:
        assert llm.engine.graphs is None and not llm.engine.parts.graph_safe
        assert texts(llm.generate(PROMPTS, PARAMS)) == resident(model, quantization)
        stats = llm.stats()
        assert stats.cached_tokens > 0 and stats.preemptions > 0 and stats.split_prompts > 0
    figures = stats.offload
    assert figures is not None and figures.copies.num_bytes > 0
    assert (figures.slots.hits > 0) == (regime != "stream")
    report = JobReport.of(stats, model=model, device="cpu", answered=4, failed=0, seconds=1.0)
    names = [name for name, _ in report.rows()]
    assert "experts copied to the GPU" in names and "time waited for experts" in names
    assert (
        report.as_dict()["offload"]["num_bytes"] == stats.as_dict()["offload"]["num_bytes"] == figures.copies.num_bytes
    )


def answer(rank: int, num_ranks: int, port: int, kinds: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Of each kind: all answers, experts that arrived here, and whether the ranks share their host memory."""
    balance_module.next_placements = anywhere  # pyright: ignore
    results = []
    for number, (model, offload, balance) in enumerate(kinds):
        if number == len(kinds) - 1:  # the ranks take each other for those of another node
            host_experts.node_key = lambda: f"node {rank}"  # pyright: ignore
        as_torchrun(rank, num_ranks, port + number)
        made = config(model, OffloadConfig(**offload), **balance)
        made.engine.force_preempt_every = 0
        with LLM(config=made) as llm:
            found = texts(llm.generate(PROMPTS, PARAMS))
            stats, held = llm.stats(), llm.engine.parts.offload
            assert held is not None and stats.offload is not None
            results.append((found, stats.experts_moved, stats.offload.copies.num_bytes, held.host.by_table))
    return results


def test_experts_move_between_ranks_that_share_them_in_host_memory() -> None:
    """Anywhere, with replicas and empty slots, so that tables change, and where ranks share nothing bytes, under slots
    that are held and on their way; the answers are those of one rank."""
    held = {"slots_per_layer": 2}
    kinds = [
        ("demo", {"regime": "cache", **held}, {**EVERY_5, "redundant_experts": 2}),
        ("demo-deepseek", {"regime": "stream", **held}, {**EVERY_5, "redundant_experts": 3}),
        ("demo-deepseek", {"regime": "auto", "tier": "disk", "host_gb": 0.002, **held}, EVERY_5),
        ("demo", {"regime": "auto", **held}, {**EVERY_5, "redundant_experts": 2}),
    ]
    results = run_ranks(answer, 2, free_port(), kinds, joined=False, timeout_s=240)
    for number, (model, _, _) in enumerate(kinds):
        for found, moved, num_bytes, by_table in (of_rank[number] for of_rank in results):
            assert found == resident(model)
            assert moved > 20 and num_bytes > 0 and by_table == (number < len(kinds) - 1)
