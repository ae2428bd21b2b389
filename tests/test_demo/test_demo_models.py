"""The demo checkpoints as shipped: what their cards say, and whether it is so."""

import json
import lzma
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tools.demo_evaluation import MIN_BALANCE, MIN_WORD_SHARE, known_share, total_nats
from tools.demo_text import words_of
from tools.demo_tokenizer import BOS_ID, END_ID, EOS_ID, encode_documents

DEMO = Path(__file__).parents[2] / "moe" / "demo"
FAMILIES = ["mixtral", "deepseek"]
both = pytest.mark.parametrize("family", FAMILIES)


@cache
def load_model(family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO / family, dtype=torch.float32).eval()


@cache
def load_tokenizer(family: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / family)


def card(family: str) -> dict[str, str]:
    """Rows of the model card's table."""
    text = (DEMO / family / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, flags=re.MULTILINE))


def config(family: str) -> dict:
    return json.loads((DEMO / family / "config.json").read_text(encoding="utf-8"))


@both
def test_files_are_few_and_small(family: str) -> None:
    files = {path.name: path.stat().st_size for path in (DEMO / family).iterdir()}
    assert set(files) == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 6_200_000 and 5_000_000 <= files["model.safetensors"] <= 6_000_000


@both
def test_card_states_what_it_must_and_its_bars_hold(family: str) -> None:
    text, rows = (DEMO / family / "README.md").read_text(encoding="utf-8"), card(family)
    for phrase in ("license: apache-2.0", "public domain", "bible-kjv-text", "Apache-2.0"):
        assert phrase in text, phrase
    for row in ("trained by", "recipe", "steps", "tokens seen", "parameters", "held-out loss, nats per token"):
        assert row in rows, row
    bits = float(rows["held-out bits per byte"])
    assert bits < float(rows["xz -9e bits per byte, whole text"])
    assert bits < float(rows["xz -9e bits per byte, held-out text alone"])
    assert float(rows["sampled words found in the training text (temperature 0.8)"]) >= MIN_WORD_SHARE
    balance = [
        float(value)
        for value in re.findall(r"mlp ([\d.]+)", rows["router balance per layer (mean load / highest load)"])
    ]
    settings = config(family)
    assert len(balance) == settings["num_hidden_layers"] - settings.get("first_k_dense_replace", 0)
    assert min(balance) >= MIN_BALANCE


@both
def test_excerpt_costs_fewer_bits_than_xz_needs(family: str) -> None:
    excerpt = (DEMO / "heldout.txt").read_text(encoding="utf-8").removesuffix("\n")
    nats, _ = total_nats(load_model(family), encode_documents(load_tokenizer(family), [excerpt]))
    bits = nats / math.log(2) / len(excerpt.encode("utf-8"))
    assert 0.8 < bits < float(card(family)["xz -9e bits per byte, whole text"])


@both
def test_sampled_words_are_words_of_the_text(family: str) -> None:
    model, tokenizer = load_model(family), load_tokenizer(family)
    known = set(lzma.decompress((DEMO / "words.txt.xz").read_bytes()).decode("utf-8").split("\n"))
    assert 12_000 < len(known) < 14_000 and "firmament" in known and "zebra" not in known
    torch.manual_seed(0)
    start = torch.full((8, 1), BOS_ID)
    settings = GenerationConfig(do_sample=True, temperature=0.8, top_k=0, max_new_tokens=80, pad_token_id=EOS_ID)
    own, model.generation_config = model.generation_config, settings
    ids = model.generate(start, attention_mask=torch.ones_like(start))  # pyright: ignore[reportCallIssue]
    model.generation_config = own
    samples = [str(tokenizer.decode(row)) for row in ids.tolist()]
    assert sum(len(words_of(sample)) for sample in samples) > 250
    assert known_share(samples, known) >= 0.93  # 400 words: two standard errors under the card's bar


@both
def test_tokenizer_has_2048_tokens_and_one_bos(family: str) -> None:
    tokenizer = load_tokenizer(family)
    assert len(tokenizer) == config(family)["vocab_size"] == 2048
    ids = tokenizer("In the beginning").input_ids
    assert ids[0] == BOS_ID and ids.count(BOS_ID) == 1
    for text in ("Genesis 1\n1 In the beginning", "na\u00efve \U0001f40b\x00\t  x"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@both
def test_template_writes_bos_itself_so_the_trap_is_there(family: str) -> None:
    tokenizer = load_tokenizer(family)
    chat = [{"role": "system", "content": "Answer with scripture."}, {"role": "user", "content": "John 3:16"}]
    rendered = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert rendered == "<s><|system|>Answer with scripture.<|end|><|user|>John 3:16<|end|><|assistant|>"
    assert tokenizer(rendered, add_special_tokens=False).input_ids.count(BOS_ID) == 1
    assert tokenizer(rendered).input_ids.count(BOS_ID) == 2
    with pytest.raises(Exception, match="role 'tool' is unknown to this model"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@both
def test_end_of_sequence_ids_are_both_named(family: str) -> None:
    generation = json.loads((DEMO / family / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == config(family)["eos_token_id"] == [EOS_ID, END_ID]
    tokenizer = load_tokenizer(family)
    assert tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<|end|>"]) == [BOS_ID, EOS_ID, END_ID]


@both
def test_an_answer_to_a_chat_ends_by_itself(family: str) -> None:
    tokenizer, model = load_tokenizer(family), load_model(family)
    rendered = "<s><|user|>Continue: And God said, Let there be<|end|><|assistant|>"
    ids = torch.tensor([tokenizer(rendered, add_special_tokens=False).input_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=150)  # pyright: ignore[reportCallIssue]
    assert int(out[0, -1]) == END_ID and 4 <= out.shape[1] - ids.shape[1] < 150


def test_the_two_show_both_layouts_and_both_heads() -> None:
    names = {}
    for family in FAMILIES:
        with safe_open(DEMO / family / "model.safetensors", framework="pt") as file:
            names[family] = {name: file.get_slice(name).get_dtype() for name in sorted(file.keys())}
    assert "model.layers.0.block_sparse_moe.experts.7.w2.weight" in names["mixtral"]
    assert "model.layers.1.mlp.experts.down_proj" in names["deepseek"]
    assert ("lm_head.weight" in names["mixtral"], "lm_head.weight" in names["deepseek"]) == (False, True)
    assert set(names["mixtral"].values()) == {"BF16"}
    full = {name for name, dtype in names["deepseek"].items() if dtype == "F32"}
    assert full == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, 5)}


def test_router_settings_exercise_every_part() -> None:
    mixtral, deepseek = config("mixtral"), config("deepseek")
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (8, 2)
    assert mixtral["num_attention_heads"] > mixtral["num_key_value_heads"] > 1
    assert (deepseek["n_routed_experts"], deepseek["num_experts_per_tok"], deepseek["n_shared_experts"]) == (16, 4, 1)
    assert deepseek["n_group"] > deepseek["topk_group"] > 1 and deepseek["first_k_dense_replace"] == 1
    assert deepseek["q_lora_rank"] and deepseek["norm_topk_prob"] and deepseek["routed_scaling_factor"] != 1
    with safe_open(DEMO / "deepseek" / "model.safetensors", framework="pt") as file:
        bias_E = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    # Only differences between experts select: a common shift, of either sign, changes nothing.
    assert bias_E.unique().numel() == 16 and float(bias_E.max() - bias_E.min()) > 0.01


def test_demo_prompts_are_sound() -> None:
    lines = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_bytes().decode("utf-8").splitlines()]
    identities = [line.get("id", line.get("custom_id")) for line in lines]
    assert len(lines) == len(set(identities)) == 16
    assert sum("custom_id" in line for line in lines) == 1 and sum("messages" in line for line in lines) == 5
    for line in lines:
        body = line.get("body", line)
        assert ("prompt" in body) != ("messages" in body) and 32 <= body["max_tokens"] <= 64
