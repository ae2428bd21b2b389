"""Replayed decode steps: the same answers as launched ones, whatever the batch is padded to."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from moe import LLM, SamplingParams
from moe.engine.cuda_graphs import graph_sizes
from tests.tiny_models import write_variant


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 100, 256, 1000])
def test_the_ladder_covers_every_batch_with_little_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch <= max(batch / 4, 1) or size - batch <= 15


def answers(folder: Path, *, graphs: bool, **options: int):
    """Token ids of 21 mixed requests and what each expert was given, with or without replay."""
    llm = LLM(str(folder), device="cuda", dtype="bfloat16", num_blocks=400, cuda_graphs=graphs, **options)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 250, (3 + 5 * i,), generator=generator).tolist() for i in range(21)]
    params = [
        SamplingParams(max_tokens=5 + 3 * (i % 6), temperature=0.7 * (i % 2), seed=i, ignore_eos=True, detokenize=False)
        for i in range(21)
    ]
    ids = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
    loads = llm.stats().expert_counts
    # What a graph reads must outlive its capture: fill all that was given back meanwhile, then replay.
    junk = [torch.full((size,), 2**40, device="cuda") for size in (1, 2, 4, 8, 32, 64, 512, 2**20) for _ in range(64)]
    again = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
    assert again == ids and len(junk) == 512
    return ids, loads, llm


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["mixtral-window", "qwen3_moe", "deepseek_v2-groups", "deepseek_v3-yarn"])
def test_replayed_steps_give_the_same_ids_and_loads(tmp_path: Path, variant: str) -> None:
    write_variant(tmp_path, variant, dtype="bfloat16")
    launched, launched_load, llm = answers(tmp_path, graphs=False)
    assert llm.engine.runner.graphs is None
    llm.close()
    replayed, replayed_load, llm = answers(tmp_path, graphs=True)
    assert llm.engine.runner.graphs is not None and llm.engine.runner.graphs.num_graphs > 2
    assert replayed == launched
    assert replayed_load == launched_load, "padding rows were counted, or went to experts"
    llm.close()
    preempted, _, llm = answers(tmp_path, graphs=True, force_preempt_every=4)
    assert preempted == launched and llm.stats().preemptions > 0
    llm.close()
    gc.collect()
