"""What a demo model is worth: bits per byte against xz, share of real words in its samples, router balance; its card.

Reads a saved folder as anyone would (transformers, bf16 weights computed in fp32) and the text; trains nothing.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from tools.demo_models import CONTEXT, register_dense_experts, watch_loads
from tools.demo_text import Split, vocabulary, words_of, xz_size
from tools.demo_tokenizer import BOS_ID, EOS_ID, encode_documents

MAX_BYTES = 6_000_000
MIN_WORD_SHARE = 0.95
MIN_BALANCE = 0.5
NUM_SAMPLES, SAMPLE_TOKENS, TEMPERATURE = 20, 200, 0.8


@dataclass(frozen=True)
class Evaluation:
    """All figures of one checkpoint. Bits per byte count the end-of-text tokens' bits, but not their bytes."""

    heldout_bytes: int
    heldout_loss: float  # nats per token
    heldout_bpb: float
    xz_whole_bpb: float  # xz -9e over the whole text
    xz_heldout_bpb: float  # over the held-out chapters alone
    xz_primed_bpb: float  # what the held-out chapters add to the compressed training chapters
    word_share: float
    balance: dict[str, float]  # per MoE layer: mean load / highest load on the held-out chapters; 1 is even
    weight_bytes: int
    sample: str

    def missed_bars(self) -> list[str]:
        """One sentence per requirement that does not hold."""
        bars = {
            f"held-out {self.heldout_bpb:.3f} bits per byte >= xz on the whole text": self.heldout_bpb
            >= self.xz_whole_bpb,
            f"held-out {self.heldout_bpb:.3f} bits per byte >= xz on the held-out text": self.heldout_bpb
            >= self.xz_heldout_bpb,
            f"share of real words {self.word_share:.3f} < {MIN_WORD_SHARE}": self.word_share < MIN_WORD_SHARE,
            f"router balance {min(self.balance.values()):.3f} < {MIN_BALANCE}": min(self.balance.values())
            < MIN_BALANCE,
            f"weights of {self.weight_bytes} bytes > {MAX_BYTES}": self.weight_bytes > MAX_BYTES,
        }
        return [sentence for sentence, missed in bars.items() if missed]


def evaluate(folder: Path, text: str, split: Split, *, device: str, seed: int) -> Evaluation:
    """Every figure of the checkpoint in this folder."""
    register_dense_experts()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="dense")
    model = model.to(torch.device(device)).eval()  # pyright: ignore[reportArgumentType]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loads = watch_loads(model)
    nats, tokens = total_nats(model, encode_documents(tokenizer, split.heldout))
    loads_LE = loads.take()
    samples = [str(tokenizer.decode(ids)) for ids in sample_tokens(model, seed=seed).tolist()]
    heldout, train = "\n\n".join(split.heldout) + "\n", "\n\n".join(split.train) + "\n\n"
    heldout_bytes = sum(len(chapter.encode("utf-8")) for chapter in split.heldout)
    return Evaluation(
        heldout_bytes=heldout_bytes,
        heldout_loss=nats / tokens,
        heldout_bpb=nats / math.log(2) / heldout_bytes,
        xz_whole_bpb=8 * xz_size(text) / len(text.encode("utf-8")),
        xz_heldout_bpb=8 * xz_size(heldout) / len(heldout.encode("utf-8")),
        xz_primed_bpb=8 * (xz_size(train + heldout) - xz_size(train)) / len(heldout.encode("utf-8")),
        word_share=known_share(samples, set(vocabulary(split.train))),
        balance={
            name: float(load_E.mean() / load_E.max()) for name, load_E in zip(loads.layer_names, loads_LE, strict=True)
        },
        weight_bytes=(folder / "model.safetensors").stat().st_size,
        sample=strip_special_tokens(samples[0]),
    )


@torch.no_grad()
def total_nats(model: PreTrainedModel, documents: list[list[int]], context: int = CONTEXT) -> tuple[float, int]:
    """Sum of -log p over every token but each document's first, and how many those are.

    Windows overlap by half, so a token far into a document is predicted from at least context / 2 tokens.
    """
    rows: list[tuple[list[int], int]] = []  # a window and its first scored target
    for ids in documents:
        rows.append((ids[:context], 1))
        rows += [(ids[end - context : end], context // 2) for end in range(context * 3 // 2, len(ids), context // 2)]
        scored = context + max(0, len(range(context * 3 // 2, len(ids), context // 2))) * (context // 2)
        if scored < len(ids):
            rows.append((ids[-context:], context - (len(ids) - scored)))
    nats, tokens = 0.0, 0
    for start in range(0, len(rows), 8):
        batch = rows[start : start + 8]
        width = max(len(ids) for ids, _ in batch)
        ids_BT = torch.tensor([ids + [BOS_ID] * (width - len(ids)) for ids, _ in batch], device=model.device)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
        loss_BT = functional.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), ids_BT[:, 1:], reduction="none")
        for row, (ids, first) in enumerate(batch):
            nats += float(loss_BT[row, first - 1 : len(ids) - 1].double().sum())
            tokens += len(ids) - first
    return nats, tokens


def sample_tokens(model: PreTrainedModel, *, seed: int) -> Tensor:
    """NUM_SAMPLES runs of SAMPLE_TOKENS tokens from a lone BOS, on through end-of-text tokens, at TEMPERATURE."""
    torch.manual_seed(seed)
    # In place of the checkpoint's own: no end-of-sequence ids, and nothing cut from the distribution.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=SAMPLE_TOKENS, pad_token_id=EOS_ID
    )
    start = torch.full((NUM_SAMPLES, 1), BOS_ID, device=model.device)
    return model.generate(start, attention_mask=torch.ones_like(start))[:, 1:]  # pyright: ignore[reportCallIssue]


def strip_special_tokens(text: str) -> str:
    """Special tokens part words, so each becomes a space."""
    return re.sub(r"</?s>|<\|\w+\|>", " ", text).strip()


def known_share(samples: list[str], known: set[str]) -> float:
    """Share of sampled words that are known; the last word of a sample may be cut short and does not count."""
    words = [word for sample in samples for word in words_of(strip_special_tokens(sample))[:-1]]
    return sum(word in known for word in words) / max(1, len(words))


def model_card(title: str, figures: Evaluation, training: dict[str, str]) -> str:
    """README.md of a checkpoint. Its table is read by tests: keep the row names."""
    balance = ", ".join(f"{name.removeprefix('model.')} {value:.2f}" for name, value in figures.balance.items())
    rows = {
        **training,
        "held-out loss, nats per token": f"{figures.heldout_loss:.4f}",
        "held-out bits per byte": f"{figures.heldout_bpb:.4f}",
        "xz -9e bits per byte, whole text": f"{figures.xz_whole_bpb:.4f}",
        "xz -9e bits per byte, held-out text alone": f"{figures.xz_heldout_bpb:.4f}",
        "xz -9e bits per byte, held-out text after the training text": f"{figures.xz_primed_bpb:.4f}",
        f"sampled words found in the training text (temperature {TEMPERATURE})": f"{figures.word_share:.4f}",
        "router balance per layer (mean load / highest load)": balance,
        "weights, bytes": f"{figures.weight_bytes}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    quote = "\n".join(f"> {line}" for line in figures.sample[:400].split("\n"))
    return f"""\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# {title}

A tiny Mixture-of-Experts language model that shows the runtime at work. It writes in the manner of its one book and
knows nothing else: do not use it for anything but trying things out.

**Data.** The King James Version of the Bible, 4.2 MB, as Debian's package `bible-kjv-text` ships it. The text is of
1611; Debian's copyright file states that its copyright has expired: it is in the public domain. 48 chapters, every
25th, are held out and were read once, for the figures below; 24 more chose the checkpoint.

**Licence.** The weights and the tokenizer are under Apache-2.0, like the rest of the project.

**Format.** Plain text: a heading ("Genesis 1"), then numbered verses, `</s>` at the chapter's end. Chat: "Continue:
<first words of a verse>", "Read Genesis 1:1" or "Genesis 1:1"; an answer ends in `<|end|>`. The chat template
writes `<s>` itself.

| | |
|---|---|
{table}

A sample, from `<s>` alone:

{quote}
"""
