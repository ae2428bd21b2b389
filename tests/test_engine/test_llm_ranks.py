"""Experts over several processes, through the Python API: the answers of one rank, whoever has how much to do."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

from configs.schema import CacheConfig, Config, EngineConfig, ParallelConfig
from moe.engine.llm import LLM
from moe.engine.memory_plan import GIB
from moe.engine.request import RequestOutput, SamplingParams
from moe.engine.runner import Runner
from tests.ranks import RanksFailed, run_ranks

# Answers of very different lengths: every N-th is a rank's, so that ranks end at different steps.
PROMPTS = ["In the beginning", "And", "Blessed are the meek, for they shall", "Thus saith", "The", "Woe unto"]
TOKENS = [24, 2, 9, 1, 17, 3]
PARAMS = [SamplingParams(max_tokens=count, temperature=0.8 * (count % 2), seed=1, ignore_eos=True) for count in TOKENS]
PARAMS[2] = SamplingParams(
    max_tokens=9, repetition_penalty=1.3, logprobs=2, temperature=0.5, seed=2
)  # holds steps back


def config(model: str, quantization: str = "auto", **parallel: Any) -> Config:
    engine = EngineConfig(device="cpu", max_batched_tokens=16, max_num_seqs=4)
    return Config(
        model=model,
        quantization=quantization,
        engine=engine,
        cache=CacheConfig(num_blocks=32),
        parallel=ParallelConfig(timeout_s=60, **parallel),
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_torchrun(rank: int, num_ranks: int, port: int) -> None:
    """What torchrun would say to this process."""
    values = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def texts(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in o.outputs] for o in outputs]


def answer(rank: int, num_ranks: int, port: int, kinds: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Of each kind: all answers, those of one prompt alone, and the own share of three."""
    results = []
    for number, (model, parallel) in enumerate(kinds):
        as_torchrun(rank, num_ranks, port + number)
        with LLM(config=config(model, **parallel)) as llm:
            plan, forecast = llm.engine.plan, llm.engine.parts.forecast
            assert plan.buffer_bytes > 0 and plan.row_cap is not None
            assert forecast is not None and forecast.plan is not None and not forecast.misses(plan)
            planned = (forecast.plan.buffer_bytes, forecast.plan.moving_bytes, forecast.plan.row_cap)
            assert planned == (plan.buffer_bytes, plan.moving_bytes, plan.row_cap)
            words = f"rows between ranks {plan.buffer_bytes / GIB:.3f} and {plan.buffer_bytes / GIB:.3f}"
            assert words in forecast.against(plan)
            assert plan.row_cap == parallel.get("row_cap", plan.row_cap)
            together = texts(llm.generate(PROMPTS, PARAMS))
            single = texts(llm.generate(PROMPTS[4], PARAMS[4]))  # other ranks have no request at all
            for other in (PROMPTS[: 2 + rank], [f"{rank}", "And"]):  # nobody's answers are mixed up with another's
                with pytest.raises(ValueError, match="were given other prompts or parameters than rank 0"):
                    llm.generate(other, PARAMS[1])
            share = texts(llm.generate(PROMPTS[:3], PARAMS[:3], own_share=True))
            results.append((together, single, share))
    return results


def expected(model: str, quantization: str = "auto") -> list[list[Any]]:
    with LLM(config=config(model, quantization)) as llm:
        return texts(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [
        (2, [("demo", {}), ("demo-deepseek", {"row_cap": 16})]),
        (4, [("demo", {"dispatcher": "all_gather"}), ("demo-deepseek", {})]),
        # Experts in fp8: rows travel quantised.
        (
            2,
            [("demo", {"quantization": "fp8"}), ("demo-deepseek", {"quantization": "fp8", "dispatcher": "all_gather"})],
        ),
        (9, [("demo", {})]),  # one rank more than experts, and three without a request
    ],
)
def test_answers_are_those_of_one_rank(num_ranks: int, kinds: list[tuple[str, dict[str, Any]]]) -> None:
    results = run_ranks(answer, num_ranks, free_port(), kinds, joined=False, timeout_s=240)
    for number, (model, settings) in enumerate(kinds):
        alone = expected(model, settings.get("quantization", "auto"))
        for rank in range(num_ranks):
            together, single, share = results[rank][number]
            assert together == alone
            assert single == alone[4:5]
            assert share == alone[:3][rank::num_ranks]


def answer_with_a_fault(rank: int, num_ranks: int, port: int) -> str:
    as_torchrun(rank, num_ranks, port)
    llm = LLM(config=config("demo"))
    launch, steps = Runner.launch, []

    def failing(self: Runner, *args: Any) -> Any:
        steps.append(1)
        if rank == 1 and len(steps) == 4:
            raise ArithmeticError("the cause itself")
        return launch(self, *args)

    Runner.launch = failing  # pyright: ignore[reportAttributeAccessIssue]
    begin = time.monotonic()
    try:
        llm.generate(PROMPTS, PARAMS)
    except RuntimeError as error:
        assert time.monotonic() - begin < 20
        llm.close()
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_fault_on_one_rank_is_told_on_all_with_its_rank_and_cause() -> None:
    for text in run_ranks(answer_with_a_fault, 3, free_port(), joined=False, timeout_s=100):
        assert "the ranks stop: rank 1: StepError: stage" in text and "ArithmeticError: the cause itself" in text


def different_settings(rank: int, num_ranks: int, port: int) -> None:
    as_torchrun(rank, num_ranks, port)
    LLM(config=config("demo", row_cap=16 + rank))


def test_ranks_with_different_settings_refuse_to_start() -> None:
    with pytest.raises(RanksFailed, match=r"settings: rank 0 has .*row_cap=16.*but rank 1 has .*row_cap=17"):
        run_ranks(different_settings, 2, free_port(), joined=False)
