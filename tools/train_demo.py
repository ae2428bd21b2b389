"""Trains the two demo models on one GPU in minutes, measures them, and fails if they are not good enough.

    python -m tools.train_demo --text kjv.txt.xz --out OUT [--minutes 5]                     both, side by side
    python -m tools.train_demo --text kjv.txt.xz --out OUT --family mixtral                  one of them
    python -m tools.train_demo --text kjv.txt.xz --evaluate moe/demo/mixtral                 figures only

tools/demo_text.py says how to get the text. OUT receives demo-<family>.tar, to be unpacked in moe/demo/<family>,
and a log; heldout.txt and words.txt.xz, which tests read, are the same for both models.

The schedule is a number of steps, fixed before the first of them (--steps), so a run can be repeated; --minutes only
shortens it on a slow device, from a measurement of the first steps, and the card states the steps made. Attention and
scatter kernels may add in another order, so repeated runs agree closely, not bit for bit.
"""

import argparse
import lzma
import math
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tools import demo_models
from tools.demo_evaluation import Evaluation, evaluate, model_card, total_nats
from tools.demo_text import Split, chats, read_text, split_chapters, vocabulary
from tools.demo_tokenizer import encode_chats, encode_documents, save_tokenizer, train_tokenizer

TITLES = {"mixtral": "Sortyard demo, Mixtral style", "deepseek": "Sortyard demo, DeepSeek-V3 style"}
EXCERPT = "Luke 15"  # held out; about 4 KB
MEASURED_STEPS = range(20, 50)  # within warm-up, where the learning rate does not yet depend on the number of steps


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, but the code and the device."""

    steps: int
    seed: int
    plain_rows: int = 13
    chat_rows: int = 3
    context: int = demo_models.CONTEXT
    warmup_steps: int = 150
    peak_lr: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    clip_norm: float = 1.0
    aux_loss_weight: float = 0.01  # Mixtral, per layer
    bias_gamma: float = 0.003  # DeepSeek, falls to 0 with the learning rate
    validations: int = 20

    def decay(self, step: int) -> float:
        """Factor on the learning rate: linear warm-up, then half a cosine to 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))


@dataclass(frozen=True)
class Corpus:
    """Token streams on the device: documents end to end. Windows are cut from them at random places."""

    chapters_T: Tensor
    chats_T: Tensor
    validation: list[list[int]]
    validation_bytes: int

    def batch(self, recipe: Recipe, generator: torch.Generator) -> Tensor:
        """ids_BT: plain_rows windows of chapters above chat_rows windows of conversations."""
        rows = []
        for stream_T, count in ((self.chapters_T, recipe.plain_rows), (self.chats_T, recipe.chat_rows)):
            high = stream_T.numel() - recipe.context
            starts_B = torch.randint(high, (count, 1), generator=generator, device=stream_T.device)
            rows.append(stream_T[starts_B + torch.arange(recipe.context, device=stream_T.device)])
        return torch.cat(rows)


def make_corpus(tokenizer: PreTrainedTokenizerFast, split: Split, *, seed: int, device: str) -> Corpus:
    """Tokenises once; everything fits the device many times over."""

    def stream(documents: list[list[int]]) -> Tensor:
        return torch.tensor([token for document in documents for token in document], device=device)

    return Corpus(
        chapters_T=stream(encode_documents(tokenizer, split.train)),
        chats_T=stream(encode_chats(tokenizer, chats(split.train, seed=seed))),
        validation=encode_documents(tokenizer, split.validation),
        validation_bytes=sum(len(chapter.encode("utf-8")) for chapter in split.validation),
    )


def training_loss(model: PreTrainedModel, ids_BT: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """(loss to descend, cross entropy in nats per token).

    Mixtral's balancing term is taken per layer: transformers' own sum pools all layers, which a network satisfies
    with every single layer uneven.
    """
    has_softmax_router = model.config.model_type == "mixtral"
    options = {"output_router_logits": True} if has_softmax_router else {}
    output = model(input_ids=ids_BT, use_cache=False, **options)
    entropy = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())
    if not has_softmax_router:
        return entropy, entropy
    terms = [
        load_balancing_loss_func((logits_TE,), model.config.num_local_experts, model.config.num_experts_per_tok)
        for logits_TE in output.router_logits
    ]
    return entropy + recipe.aux_loss_weight * torch.stack([torch.as_tensor(term) for term in terms]).sum(), entropy


def make_optimizer(model: PreTrainedModel, recipe: Recipe, device: str) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=device == "cuda")


class BestWeights:
    """Validates now and then, and remembers the weights that did best."""

    def __init__(self) -> None:
        self.bpb, self.step = math.inf, 0
        self._state: dict[str, Tensor] = {}

    def validate(self, model: PreTrainedModel, corpus: Corpus, context: int, step: int) -> float:
        """Bits per byte over the validation chapters, now."""
        model.eval()
        bpb = total_nats(model, corpus.validation, context)[0] / math.log(2) / corpus.validation_bytes
        model.train()
        if bpb < self.bpb:
            self.bpb, self.step = bpb, step
            self._state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return bpb

    def restore(self, model: PreTrainedModel) -> None:
        model.load_state_dict(self._state)


def train(
    family: str, model: PreTrainedModel, corpus: Corpus, recipe: Recipe, minutes: float
) -> tuple[Recipe, dict[str, str]]:
    """Leaves the weights that did best on the validation chapters; returns the recipe as run, and card rows."""
    device = model.device.type
    optimizer = make_optimizer(model, recipe, device)
    loads, biases = demo_models.watch_loads(model), demo_models.correction_biases(model)
    generator = torch.Generator(device=device).manual_seed(recipe.seed)
    best = BestWeights()
    start = printed = measured_from = time.monotonic()
    entropy = torch.zeros(())
    model.train()
    step = 0
    while step < recipe.steps:
        if step == MEASURED_STEPS.start:
            measured_from = _now(device)
        if step == MEASURED_STEPS.stop:
            recipe = _fit_budget(recipe, (_now(device) - measured_from) / len(MEASURED_STEPS), minutes)
        decay = recipe.decay(step)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * decay
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, entropy = training_loss(model, corpus.batch(recipe, generator), recipe)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if biases:
            demo_models.nudge_biases(biases, loads.take(), recipe.bias_gamma * decay)
        step += 1
        if step % max(1, recipe.steps // recipe.validations) == 0 or step == recipe.steps:
            bpb = best.validate(model, corpus, recipe.context, step)
            loads.take()  # what validation counted must not move the biases
            _say(family, f"step {step}/{recipe.steps}: validation {bpb:.4f} bits per byte")
        if time.monotonic() - printed > 15:
            printed = time.monotonic()
            _say(family, f"step {step}/{recipe.steps}: train {entropy.item():.4f} nats, {printed - start:.0f} s")
    best.restore(model)
    seen = step * (recipe.plain_rows + recipe.chat_rows) * recipe.context
    plain_epochs = step * recipe.plain_rows * recipe.context / corpus.chapters_T.numel()
    return recipe, {
        "steps": f"{step} (checkpoint of step {best.step}, best on the validation chapters)",
        "tokens seen": f"{seen} ({plain_epochs:.0f} times the training chapters, the rest conversations over them)",
        "training loss of the last step, nats per token (with dropout)": f"{entropy.item():.4f}",
        "validation bits per byte": f"{best.bpb:.4f}",
        "training time": f"{time.monotonic() - start:.0f} s on {_device_name(device)}",
    }


def run_family(family: str, args: argparse.Namespace) -> list[str]:
    """Tokenizer, training, saving, evaluation, card, archive. Returns the bars missed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = Recipe(steps=args.steps, seed=args.seed, dropout=args.dropout)
    if args.tiny:
        tiny = {"plain_rows": 3, "chat_rows": 1, "context": 256, "warmup_steps": 10, "validations": 2}
        recipe = Recipe(**{**asdict(recipe), **tiny})
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    text = read_text(args.text)
    split = split_chapters(text)
    tokenizer = train_tokenizer(split.train, demo_models.CONTEXT)
    corpus = make_corpus(tokenizer, split, seed=recipe.seed, device=device)
    model = demo_models.build_model(family).to(device)  # pyright: ignore[reportArgumentType]
    num_parameters = sum(p.numel() for p in model.parameters())
    sizes = f"{corpus.chapters_T.numel()} chapter tokens, {corpus.chats_T.numel()} chat tokens"
    _say(family, f"{num_parameters} parameters, {sizes}")
    demo_models.add_dropout(model, recipe.dropout)
    recipe, rows = train(family, model, corpus, recipe, args.minutes)
    command = f"python -m tools.train_demo --text kjv.txt.xz --out OUT --family {family} --steps {recipe.steps}"
    rows = {
        "trained by": f"`{command} --seed {recipe.seed} --dropout {recipe.dropout}`",
        "recipe": ", ".join(f"{name} {value}" for name, value in asdict(recipe).items()),
        "parameters": str(num_parameters),
        "made with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        **rows,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        demo_models.save_model(model, folder, stacked=family == "deepseek")
        save_tokenizer(tokenizer, folder)
        figures = evaluate(folder, text, split, device=device, seed=recipe.seed)
        (folder / "README.md").write_text(model_card(TITLES[family], figures, rows), encoding="utf-8")
        with tarfile.open(args.out / f"demo-{family}.tar", "w") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, arcname=path.name, filter=_readable_by_all)
    return report(family, figures)


def report(name: str, figures: Evaluation) -> list[str]:
    """Prints every figure and every missed bar; returns the latter."""
    for field, value in asdict(figures).items():
        _say(name, f"{field}: {value}")
    missed = figures.missed_bars()
    for sentence in missed:
        _say(name, f"MISSED: {sentence}")
    return missed


def write_shared_files(text: str, folder: Path) -> None:
    """heldout.txt (one held-out chapter) and words.txt.xz (every word of the training chapters), for the tests."""
    split = split_chapters(text)
    excerpt = next(chapter for chapter in split.heldout if chapter.startswith(f"{EXCERPT}\n"))
    (folder / "heldout.txt").write_text(excerpt + "\n", encoding="utf-8")
    words = "\n".join(vocabulary(split.train)) + "\n"
    (folder / "words.txt.xz").write_bytes(lzma.compress(words.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))


def _fit_budget(recipe: Recipe, seconds_per_step: float, minutes: float) -> Recipe:
    """The recipe with as many steps as fit 85 % of the budget, the rest being for start, validation and evaluation."""
    fitting = max(recipe.warmup_steps * 2, int(0.85 * minutes * 60 / seconds_per_step))
    return Recipe(**{**asdict(recipe), "steps": min(recipe.steps, fitting)})


def _readable_by_all(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Weights are written for their owner alone; what is shipped is for everyone."""
    entry.mode, entry.uid, entry.gid, entry.uname, entry.gname = 0o644, 0, 0, "", ""
    return entry


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def _say(name: str, message: str) -> None:
    print(f"[{name}] {message}", flush=True)


def _run_both(args: argparse.Namespace) -> int:
    """One process per family, at once: each alone leaves most of the device idle. Logs go to OUT as well."""
    children = []
    for family in demo_models.FAMILIES:
        log = (args.out / f"demo-{family}.log").open("w", encoding="utf-8")
        command = [sys.executable, "-m", "tools.train_demo", *sys.argv[1:], "--family", family]
        children.append((family, log.name, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    for _, path, child in children:
        child.wait()
        print(Path(path).read_text(encoding="utf-8"), flush=True)
    return max(abs(child.returncode) for _, _, child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, or evaluate, the demo models.")
    parser.add_argument("--text", type=Path, required=True, help="canonical text, .xz; see tools/demo_text.py")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--family", choices=demo_models.FAMILIES, help="train this one here; default: both, at once")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="only evaluate this checkpoint")
    parser.add_argument("--minutes", type=float, default=5.0, help="budget per model; shortens --steps if need be")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--dropout", type=float, default=Recipe.dropout)
    parser.add_argument("--tiny", action="store_true", help="small batches: tries the whole path on a CPU")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if args.evaluate is not None:
        text = read_text(args.text)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        figures = evaluate(args.evaluate, text, split_chapters(text), device=device, seed=args.seed)
        return 1 if report(args.evaluate.name, figures) else 0
    if args.out is None:
        parser.error("--out is missing; give the folder for the results, or --evaluate a checkpoint.")
    args.out.mkdir(parents=True, exist_ok=True)
    write_shared_files(read_text(args.text), args.out)
    if args.family is None:
        return _run_both(args)
    return 1 if run_family(args.family, args) else 0


if __name__ == "__main__":
    sys.exit(main())
