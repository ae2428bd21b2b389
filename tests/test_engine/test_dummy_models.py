"""The three large shapes of benchmarks/models/, with dummy weights, through `LLM.generate` on a GPU that holds them."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from moe import LLM, SamplingParams

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "models"
# GiB of bf16 weights, and some room for the cache.
NEEDED = {"qwen3-30b-a3b": 64, "dsv2-lite": 36, "mixtral-8x7b": 96}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NEEDED)
def test_a_prompt_alone_and_in_a_batch_of_48(name: str) -> None:
    """Greedy and drawn at temperature 1, of 1 to 700 tokens, chunked by a small budget: the same ids, bit for bit."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < NEEDED[name] * 2**30:
        pytest.skip(f"{name} needs {NEEDED[name]} GiB of free GPU memory")
    rng = random.Random(name)
    prompts = [[rng.randrange(30000) for _ in range(rng.randint(1, 700))] for _ in range(48)]
    params = [
        SamplingParams(max_tokens=12, temperature=float(i % 2), seed=i, ignore_eos=True, detokenize=False)
        for i in range(48)
    ]
    folder = str(MODELS / name)
    with LLM(folder, device="cuda", load_format="dummy", max_model_len=2048, max_batched_tokens=1024) as llm:
        together = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
        assert llm.stats().split_prompts > 0 and llm.stats().mixed_steps > 0
    with LLM(
        folder,
        device="cuda",
        load_format="dummy",
        max_model_len=2048,
        enable_prefix_caching=False,
    ) as llm:
        for index in (0, 1, 17, 46):
            (alone,) = llm.generate([prompts[index]], params[index])
            assert list(alone.outputs[0].token_ids) == together[index], f"prompt {index} differs alone"
        assert len({tuple(ids) for ids in together}) > 24, "answers do not depend on their prompts"
