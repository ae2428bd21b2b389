"""The training tools of the demo: text, split, chat rendering, dense experts, balancing, windowed scoring."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tools import demo_models
from tools.demo_evaluation import Evaluation, known_share, total_nats
from tools.demo_text import BOOKS, canonical_text, chats, split_chapters, vocabulary, words_of
from tools.demo_tokenizer import (
    BOS_ID,
    END_ID,
    EOS_ID,
    VOCAB_SIZE,
    encode_chats,
    encode_documents,
    render_chat,
    save_tokenizer,
    train_tokenizer,
)
from tools.train_demo import Recipe

CHAPTER = "Ruth 9\n1 And the man's hand was upon the field, 12 days.\n2 Then said she, Let me go."


@pytest.fixture(autouse=True)
def one_thread_seeded() -> None:
    torch.manual_seed(0)


def test_dump_with_a_missing_verse_is_refused() -> None:
    with pytest.raises(ValueError, match="1 chapters, 1 verses; expected 1189 and 31102"):
        canonical_text("Ge1:1 In the beginning God created the heaven and the earth.\n")
    with pytest.raises(ValueError, match="not a verse line"):
        canonical_text("Genesis Chapter 1\n")
    assert len(BOOKS) == len(set(BOOKS.values())) == 66


def test_split_keeps_every_chapter_exactly_once() -> None:
    chapters = [f"Book {i}\n1 x" for i in range(1189)]
    split = split_chapters("\n\n".join(chapters) + "\n")
    assert (len(split.heldout), len(split.validation)) == (48, 24)
    assert sorted(split.train + split.validation + split.heldout) == sorted(chapters)


def test_chats_ask_for_each_verse_and_answer_with_its_words() -> None:
    conversations = chats([CHAPTER], seed=0)
    turns = [message for conversation in conversations for message in conversation if message["role"] != "system"]
    assert len(turns) == 8  # two verses, each by its place and by its first words
    for question, answer in zip(turns[::2], turns[1::2], strict=True):
        asked = question["content"]
        if asked.startswith("Continue: "):
            assert asked.removeprefix("Continue: ") + " " + answer["content"] in CHAPTER
        else:
            verse = asked.rsplit(":", 1)[1]
            assert f"\n{verse} {answer['content']}" in CHAPTER and "Ruth 9" in asked


def test_words_and_vocabulary() -> None:
    assert words_of("The man's  hand, 12 Days.") == ["the", "man's", "hand", "days"]
    assert vocabulary(["b a", "a c"]) == ["a", "b", "c"]
    # The last word of a sample may be cut short and is not counted; special tokens part words.
    assert known_share(["a b</s><s>c zzz cut"], {"a", "b", "c"}) == pytest.approx(3 / 4)


def test_tokenizer_round_trip_and_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(train_tokenizer([CHAPTER], 1024), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = encode_documents(tokenizer, [CHAPTER])[0]
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert tokenizer.decode(ids[1:-1]) == CHAPTER
    odd = "\u00fc\U0001f600 \t\n\nx"  # bytes the text never had
    assert tokenizer.decode(tokenizer(odd, add_special_tokens=False)["input_ids"]) == odd
    conversation = [
        {"role": "system", "content": "Answer with scripture."},
        {"role": "user", "content": "Ruth 9:1"},
        {"role": "assistant", "content": "And the man"},
    ]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert rendered == render_chat(conversation)
    chat_ids = encode_chats(tokenizer, [conversation])[0]
    assert chat_ids.count(BOS_ID) == 1 and chat_ids.count(END_ID) == 3
    assert len(tokenizer) <= VOCAB_SIZE


@pytest.fixture(params=demo_models.FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    built = demo_models.build_model(request.param).eval()
    for bias_E in demo_models.correction_biases(built):
        bias_E.uniform_(-0.1, 0.1)
    return built


def test_dense_experts_equal_the_sparse_form(model: PreTrainedModel) -> None:
    ids_BT = torch.randint(0, VOCAB_SIZE, (2, 48))
    results = {}
    for implementation in ("dense", "eager"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        output = model(input_ids=ids_BT, labels=ids_BT)
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results[implementation] = {"logits": output.logits.detach(), **gradients}
    assert len(results["dense"]) == 1 + len(list(model.parameters()))
    for name, expected in results["eager"].items():
        torch.testing.assert_close(results["dense"][name], expected, rtol=2e-4, atol=1e-6, msg=name)


def test_saved_layouts_and_precisions(model: PreTrainedModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    stacked = model.config.model_type == "deepseek_v3"
    demo_models.save_model(model, tmp_path, stacked=stacked)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("model.layers.1.mlp.experts.gate_up_proj" in tensors) == stacked
    assert ("model.layers.1.block_sparse_moe.experts.7.w3.weight" in tensors) == (not stacked)
    assert ("lm_head.weight" in tensors) == stacked  # the other head is tied
    biases = {name: t for name, t in tensors.items() if name.endswith("e_score_correction_bias")}
    assert {t.dtype for name, t in tensors.items() if name not in biases} == {torch.bfloat16}
    assert {t.dtype for t in biases.values()} == ({torch.float32} if stacked else set())
    assert (tmp_path / "model.safetensors").stat().st_size <= 6_000_000
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="dense").eval()
    ids_BT = torch.randint(0, VOCAB_SIZE, (1, 32))
    torch.testing.assert_close(again(ids_BT).logits, model.float()(ids_BT).logits, rtol=1e-4, atol=1e-5)


def test_loads_count_every_choice_and_biases_lean_against_them(model: PreTrainedModel) -> None:
    loads = demo_models.watch_loads(model)
    with torch.no_grad():
        model(torch.randint(0, VOCAB_SIZE, (2, 50)))
    counts_LE = loads.take()
    assert counts_LE.sum(1).tolist() == [100.0 * model.config.num_experts_per_tok] * len(loads.layer_names)
    assert loads.counts_LE.sum() == 0
    biases = [torch.zeros(3)]
    demo_models.nudge_biases(biases, torch.tensor([[1.0, 2.0, 3.0]]), 0.5)
    assert biases[0].tolist() == [0.5, 0.0, -0.5]


def test_dropout_is_on_only_while_training(model: PreTrainedModel) -> None:
    ids_BT = torch.randint(0, VOCAB_SIZE, (1, 16))
    with torch.no_grad():
        before = model(ids_BT).logits
        demo_models.add_dropout(model, 0.5)
        torch.testing.assert_close(model(ids_BT).logits, before)
        assert (model.train()(ids_BT).logits - before).abs().max() > 1e-3


class _Counting(nn.Module):
    """Predicts token t + 1 after token t with probability 1/2; the rest is spread over the other 7 tokens."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, *, use_cache: bool) -> object:
        assert not use_cache
        probabilities = torch.full((*input_ids.shape, 8), 0.5 / 7)
        probabilities.scatter_(2, ((input_ids + 1) % 8)[..., None], 0.5)
        return type("Output", (), {"logits": probabilities.log()})()


@pytest.mark.parametrize("length", [2, 7, 8, 9, 12, 13, 40, 41])
def test_windows_score_every_token_once(length: int) -> None:
    ids = [t % 8 for t in range(length)]
    nats, tokens = total_nats(_Counting(), [ids, ids[:2]], context=8)  # pyright: ignore[reportArgumentType]
    assert tokens == length - 1 + 1
    assert nats == pytest.approx(tokens * math.log(2), rel=1e-6)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    recipe = Recipe(steps=1000, seed=0, warmup_steps=100)
    factors = [recipe.decay(step) for step in range(1001)]
    assert factors[0] == pytest.approx(0.01) and factors[99] == factors[100] == 1.0 and factors[1000] == 0.0
    assert factors[100:] == sorted(factors[100:], reverse=True)


def test_each_missed_bar_is_named() -> None:
    good = {"heldout_bytes": 1, "heldout_loss": 2.0, "heldout_bpb": 1.4, "xz_whole_bpb": 1.8, "xz_heldout_bpb": 2.3}
    good |= {"xz_primed_bpb": 1.6, "word_share": 0.97, "balance": {"a": 0.9}, "weight_bytes": 5_000_000, "sample": ""}
    assert Evaluation(**good).missed_bars() == []  # pyright: ignore[reportArgumentType]
    for field, bad, word in [
        ("heldout_bpb", 1.9, "whole text"),
        ("word_share", 0.9, "real words"),
        ("balance", {"a": 0.9, "b": 0.1}, "balance"),
        ("weight_bytes", 6_000_001, "bytes"),
    ]:
        assert word in " ".join(Evaluation(**{**good, field: bad}).missed_bars())  # pyright: ignore[reportArgumentType]
