"""Whole engines over tiny checkpoints of every family: greedy text equals transformers', a batch equals one by one.

Each variant runs with chunks, prefix caching and forced preemption, and asserts by its counters that these happened.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe
from configs.schema import CacheConfig, Config, EngineConfig
from moe import LLM, RequestOutput, SamplingParams
from moe.model.load_model import load_model
from tests.compare import max_rel
from tests.step_driver import StepDriver
from tests.tiny_models import write_tokenizer, write_variant

# One per family, with what stresses the cache most: a window, groups, YaRN.
FAMILIES = ("mixtral-window", "qwen3_moe", "deepseek_v2-groups", "deepseek_v3-yarn")
# And a DeepSeek-V2 without q_lora_rank. These two are read from stacked experts, the others from one tensor each.
STACKED = ("qwen3_moe", "deepseek_v2-lite")
DEMOS = {"demo": "mixtral", "demo-deepseek": "deepseek"}
STRESS: dict[str, Any] = {"prefill_chunk": 16, "block_size": 8, "num_blocks": 400, "force_preempt_every": 13}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Written once; the transformers model holds the same weights."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}
    for variant in dict.fromkeys(FAMILIES + STACKED):
        folder = tmp_path_factory.mktemp(variant)
        model = write_variant(folder, variant, layout="stacked" if variant in STACKED else "original")
        write_tokenizer(folder)
        made[variant] = (folder, model)
    return made


@contextmanager
def opened(model: Path | str, **options: Any) -> Iterator[LLM]:
    with LLM(str(model), **({"device": "cpu", "cpu_gb": 0.05} | options)) as llm:
        yield llm
        llm.engine.scheduler.check_idle()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@torch.no_grad()
def greedy_by_transformers(model: PreTrainedModel, prompt: list[int], ours: list[int]) -> list[int]:
    """What greedy generation gives: one pass over the whole text, each next token the arg-max of its position.

    As long as the tokens agree, this is generation without a cache; where they do not, it shows the first difference.
    """
    logits = model(torch.tensor([prompt + ours])).logits[0]
    return logits.argmax(-1)[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("variant", dict.fromkeys(FAMILIES + STACKED))
def test_64_greedy_tokens_are_those_of_transformers(
    checkpoints: dict[str, tuple[Path, PreTrainedModel]], variant: str
) -> None:
    folder, model = checkpoints[variant]
    shared = prompt_of(24, seed=1)
    prompts = [shared + prompt_of(21, seed=2), prompt_of(5, seed=4), shared + prompt_of(6, seed=3)]
    check_greedy_text(str(folder), model, prompts)


@pytest.mark.parametrize("name", DEMOS)
def test_64_greedy_tokens_of_the_demo_models_are_those_of_transformers(name: str) -> None:
    folder = Path(moe.__file__).parent / "demo" / DEMOS[name]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(name, device="cpu", cpu_gb=0.05) as llm:
        encode = llm.get_tokenizer().encode_prompt
        verses = "Luke 15\n1 Then drew near unto him all the publicans and sinners for to hear him.\n"
        prompts = [encode(verses + "2 And the Pharisees and"), encode("In the beginning"), encode(verses + "3 And he")]
    check_greedy_text(name, model, prompts)
    logits = StepDriver(load_model(folder, dtype=torch.float32, device=torch.device("cpu"), max_model_len=256)).run(
        prefill={str(index): prompt for index, prompt in enumerate(prompts)}
    )
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            assert max_rel(logits[str(index)], model(torch.tensor([prompt])).logits[0]) <= 2e-4


def check_greedy_text(name: str, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Plain, and with chunks, prefix caching and forced preemption. The third prompt comes late to a shared prefix."""
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (64, 20, 20)]
    with opened(name, enable_prefix_caching=False) as llm:
        plain = tokens(llm.generate(prompts, params))
        assert llm.engine.stats.preemptions == 0 and llm.engine.stats.split_prompts == 0
    assert [len(samples[0]) for samples in plain] == [64, 20, 20]
    assert plain == [[greedy_by_transformers(model, *each)] for each in zip(prompts, (s[0] for s in plain))]
    with opened(name, max_num_seqs=2, **STRESS) as llm:
        assert tokens(llm.generate(prompts, params)) == plain
        stats = llm.engine.stats
        assert stats.split_prompts >= 1 and stats.chunks >= 2
        assert stats.cached_tokens > 0 and stats.preemptions >= 1 and stats.mixed_steps > 0


PREFIXES = (40, 0, 16, 17)  # cached tokens of the four requests of case C38, in blocks of one token


@pytest.mark.parametrize("chunk", [1, 16, 17, 64])
def test_c38_cached_prefixes_of_unlike_length_share_a_step(tmp_path: Path, chunk: int) -> None:
    """DeepSeek-V3 with prefix caching and a workspace that every longer context passes, the shortest by one token.

    Four requests find 40, 0, 16 and 17 tokens cached and are prefilled side by side: the text of each is transformers'
    own and, bit for bit, that of the request alone without a cache, prefilled whole in an unbounded workspace.
    """
    model = write_variant(tmp_path, "deepseek_v3")
    assert model.config.v_head_dim != model.config.qk_nope_head_dim, "the case asks for unlike widths"
    prompts = [prompt_of(prefix + 20 + (prefix == 0) * 29, seed=prefix) for prefix in PREFIXES]  # the second has 49
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

    def engine(workspace: int, prefill_chunk: int | None, prefix_caching: bool) -> LLM:
        return LLM(
            config=Config(
                model=str(tmp_path),
                engine=EngineConfig(device="cpu", prefill_chunk=prefill_chunk, mla_workspace_tokens=workspace),
                cache=CacheConfig(block_size=1, num_blocks=600, prefix_caching=prefix_caching),
            )
        )

    with engine(512, None, False) as llm:
        alone = [tokens(llm.generate([prompt], params))[0][0] for prompt in prompts]
    assert alone == [greedy_by_transformers(model, *each) for each in zip(prompts, alone)]
    with engine(48, chunk, True) as llm:
        warm = [prompt[:prefix] for prompt, prefix in zip(prompts, PREFIXES) if prefix]
        llm.generate(warm, SamplingParams(max_tokens=1, temperature=0.0))
        llm.engine.stats.reset()
        outputs = llm.generate(prompts, params)
        assert tokens(outputs) == [[text] for text in alone]
        assert [output.num_cached_tokens for output in outputs] == list(PREFIXES)
        stats = llm.engine.stats
        assert stats.cached_tokens == sum(PREFIXES) and stats.chunks >= 4
        assert chunk == 64 or stats.split_prompts == 4
        llm.engine.scheduler.check_idle()


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """64 requests of all kinds: short and long prompts, shared prefixes, greedy and sampled, every sampling option."""
    rng = random.Random(64)
    shared = prompt_of(20, seed=100)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {65: 2.0}, "min_tokens": 1},
        {"temperature": 1.0, "n": 2, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1, "stop": ["a"]},
    ]
    prompts, params = [], []
    for index in range(64):
        length = rng.choice([1, 2, 7, 8, 15, 16, 17, 31, 45])
        prompts.append((shared if index % 3 == 0 else []) + prompt_of(length, seed=index % 7))
        params.append(SamplingParams(**options[index % 8], seed=index, max_tokens=rng.randrange(1, 9)))
    return prompts, params


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_batch_of_64_equals_one_by_one(checkpoints: dict[str, tuple[Path, PreTrainedModel]], variant: str) -> None:
    folder, _ = checkpoints[variant]
    check_batch_equals_one_by_one(folder, "cpu", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_a_batch_of_64_equals_one_by_one_on_the_gpu(
    checkpoints: dict[str, tuple[Path, PreTrainedModel]], variant: str, dtype: str
) -> None:
    folder, _ = checkpoints[variant]
    check_batch_equals_one_by_one(folder, "cuda", dtype)


CODED = [
    ("mixtral-window", "fp8"),
    ("deepseek_v3-yarn", "fp8"),
    ("qwen3_moe", "fp8-layer"),
    ("deepseek_v3-yarn", "fp8-layer"),
    ("mixtral-window", "int4"),
]


@pytest.mark.parametrize(("variant", "cache_dtype"), CODED)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)],
)
def test_C49_a_batch_of_64_equals_one_by_one_over_a_cache_of_codes(
    checkpoints: dict[str, tuple[Path, PreTrainedModel]],
    tmp_path: Path,
    variant: str,
    cache_dtype: str,
    device: str,
    dtype: str,
) -> None:
    """Cold against warm, whole against chunked, and what was preempted is written again as it was. Under scales that
    reach too little too, as some do here: each cut entry counts once for each time it is written."""
    folder, model = checkpoints[variant]
    options: dict[str, Any] = {"kv_cache_dtype": cache_dtype}
    if cache_dtype == "fp8-layer":
        scales = {f"model.layers.{i}.self_attn.kv_scale": 0.01 / 4**i for i in range(model.config.num_hidden_layers)}
        (tmp_path / "scales.json").write_text(json.dumps(scales))
        options["kv_cache_scales"] = str(tmp_path / "scales.json")
    saturated = check_batch_equals_one_by_one(folder, device, dtype, **options)
    assert (saturated > 0) == (cache_dtype == "fp8-layer")


def check_batch_equals_one_by_one(folder: Path, device: str, dtype: str, **more: Any) -> int:
    """Tokens, texts, endings and log-probabilities: the same bits. The cache's saturated entries in the batch."""
    prompts, params = mixed_requests()
    options = {"device": device, "dtype": dtype, "num_blocks": 400, "block_size": 8} | more
    with opened(folder, enable_prefix_caching=False, **options) as llm:
        alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
        assert llm.engine.stats.mixed_steps == 0
    with opened(folder, **(options | STRESS | {"max_batched_tokens": 96})) as llm:
        together = llm.generate(prompts, params)
        stats = llm.engine.stats
        assert stats.split_prompts >= 2 and stats.cached_tokens > 0
        assert stats.preemptions >= 1 and stats.mixed_steps > 0
        assert llm.stats().expert_balance is not None
        saturated = llm.stats().saturated_entries
    for index, (one, batched) in enumerate(zip(alone, together, strict=True)):
        assert one.outputs == batched.outputs, f"request {index}: {params[index]}"
        assert one.prompt_logprobs == batched.prompt_logprobs and one.error is None
    return saturated


def test_log_probabilities_are_the_models(checkpoints: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    """Of every prompt token and every generated one, against transformers' logits of the whole text."""
    folder, model = checkpoints["qwen3_moe"]
    prompt = prompt_of(21, seed=9)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, prompt_logprobs=0, ignore_eos=True)
    with opened(folder, prefill_chunk=8) as llm:
        (output,) = llm.generate([prompt], params)
    generated = output.outputs[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + generated.token_ids])).logits[0]
    wanted = logits.log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 21 and generated.logprobs is not None
    records = [*output.prompt_logprobs[1:], *generated.logprobs]
    total = 0.0
    for position, record in enumerate(records):
        assert record is not None
        token = (prompt + generated.token_ids)[position + 1]
        assert record[token].logprob == pytest.approx(float(wanted[position, token]), abs=2e-4)
        assert record[token].decoded_token is not None
        if position >= 20:
            total += record[token].logprob
            assert len(record) == 3 and record[token].rank == 1
    assert generated.cumulative_logprob == pytest.approx(total, abs=1e-9)


def test_c14_overflow_in_float16_ends_its_request_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two channels of token 200 lie just below 65504; layer 0 adds to one and takes from the other: one overflows."""
    folder = tmp_path / "overflow"
    write_variant(folder, "mixtral", dtype="bfloat16")
    write_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200, :2] = 60000.0
    out = weights["model.layers.0.self_attn.o_proj.weight"]
    out[0] *= 2e4
    out[1] = -out[0]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    good, bad = [10, 20, 30, 40], [10, 20, 200, 40]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logit_bias={200: -100.0})
    with opened(folder, dtype="float16") as llm:
        assert "float16" in caplog.text and "65504" in caplog.text
        alone = llm.generate([good], params)
        first, second, third = llm.generate([good, bad, good], params)
    assert tokens([first, third]) == tokens(alone * 2) and first.error is None and third.error is None
    assert second.error is not None and "NaN or infinity" in second.error
    assert (second.outputs[0].finish_reason, second.outputs[0].text) == ("error", "")
    with opened(folder, dtype="float32") as llm:
        assert llm.generate([bad], params)[0].error is None


def test_c40_lengths_of_a_real_checkpoint(checkpoints: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path) -> None:
    """max_position_embeddings 64: stops there; a longer override is refused without rope scaling, served with yarn."""
    folder = tmp_path / "short"
    write_variant(folder, "mixtral", max_position_embeddings=64)
    write_tokenizer(folder)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with opened(folder) as llm:
        sixty, sixty_five = llm.generate([prompt_of(60, seed=1), prompt_of(65, seed=2)], params)
        assert (len(sixty.outputs[0].token_ids), sixty.outputs[0].finish_reason) == (4, "length")
        assert sixty_five.error is not None and "65 tokens, but engine.max_model_len=64" in sixty_five.error
        table = llm.engine.parts.network.cos_sin_PR  # pyright: ignore[reportAttributeAccessIssue]
        assert table.shape[0] == 64
    with pytest.raises(
        ValueError, match=r"engine\.max_model_len=4096 exceeds this checkpoint's max_position_embeddings=64"
    ):
        LLM(str(folder), device="cpu", max_model_len=4096)


def test_c40_yarn_crosses_the_original_length(tmp_path: Path) -> None:
    """A yarn checkpoint that says 128 positions, scaled by 4: 512 are its own, and transformers agrees past 128."""
    folder = tmp_path / "yarn"
    model = write_variant(folder, "qwen3_moe-yarn", max_position_embeddings=128)
    write_tokenizer(folder)
    prompt = prompt_of(120, seed=3)
    with opened(folder, max_model_len=512, num_blocks=64) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    generated = output.outputs[0].token_ids
    assert len(generated) == 24 and generated == greedy_by_transformers(model, prompt, generated)
    with pytest.raises(ValueError, match=r"engine\.max_model_len=513 exceeds this checkpoint's yarn length"):
        LLM(str(folder), device="cpu", max_model_len=513)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_text_on_the_gpu_is_transformers_in_float32(
    checkpoints: dict[str, tuple[Path, PreTrainedModel]], variant: str
) -> None:
    folder, model = checkpoints[variant]
    prompt = prompt_of(40, seed=5)
    with opened(folder, device="cuda", dtype="float32", **STRESS) as llm:
        outputs = llm.generate([prompt] * 2, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    generated = outputs[0].outputs[0].token_ids
    assert outputs[1].outputs[0].token_ids == generated and len(generated) == 32
    assert generated == greedy_by_transformers(model, prompt, generated)
