"""Every key of the command line and of `LLM(...)`, as plain dataclasses. Checked and frozen once, never edited after.

Knows nothing of Hydra (registration is in `launch/`), torch or models: standard library and omegaconf only.
`configs/checks.py` holds the cross-field checks; `freeze` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any


def key(default: Any, text: str) -> Any:
    """A field with its default and the line that `--help` prints for it. A list default is copied for each config."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


class Section:
    """A group of keys that can be closed: after `freeze`, setting an attribute is an error."""

    _frozen = False

    def __setattr__(self, name: str, value: object) -> None:
        if self._frozen:
            raise AttributeError(f"{type(self).__name__} is frozen; {name} is set when the config is composed.")
        object.__setattr__(self, name, value)


@dataclass
class SamplingConfig(Section):
    """Defaults of every line; None takes the checkpoint's generation_config (chats) or the neutral value."""

    max_tokens: int | None = key(None, "most tokens of an answer; null: as many as engine.max_model_len leaves")
    min_tokens: int = key(0, "no end of sequence and no stop before so many tokens")
    temperature: float | None = key(None, "0 is greedy; null: the checkpoint's own (chats), else 1")
    top_p: float | None = key(None, "draw from the most likely tokens that hold so much probability; null or 1: all")
    top_k: int | None = key(None, "draw from so many most likely tokens; null or 0: all")
    min_p: float | None = key(None, "drop tokens below this share of the likeliest one's probability")
    repetition_penalty: float | None = key(None, "divides the logits of tokens seen in prompt or answer; 1: off")
    presence_penalty: float = key(0.0, "subtracted once from logits of tokens in the answer")
    frequency_penalty: float = key(0.0, "subtracted from logits for each time a token is in the answer")
    seed: int = key(0, "job seed; a line's seed is a hash of it, the line's id and the sample's index")
    n: int = key(1, "answers for each prompt")
    stop: list[str] = key([], "texts that end an answer")
    stop_token_ids: list[int] = key([], "token ids that end an answer")
    include_stop: bool = key(False, "leave the stop text in the answer")
    ignore_eos: bool = key(False, "go on past the end of sequence (benchmarks)")
    logprobs: int | None = key(None, "log-probabilities of so many likeliest tokens at each position")
    prompt_logprobs: int | None = key(None, "the same for the prompt's positions")


@dataclass
class EngineConfig(Section):
    """Sizes and behaviour of the engine."""

    device: str = key("auto", "auto, cuda or cpu")
    max_model_len: int | None = key(None, "prompt and answer together; null: the checkpoint's max_position_embeddings")
    max_num_seqs: int | None = key(None, "most answers in progress at a time; null: 1024 on a GPU, 256 on the CPU")
    max_batched_tokens: int = key(16384, "token budget of one step")
    prefill_chunk: int | None = key(None, "most prompt tokens of one request in one step; null: the token budget")
    cuda_graphs: bool = key(True, "replay decode steps as CUDA graphs (on a GPU)")
    capture_seconds: float = key(10.0, "time to capture graphs in before the first step; the rest when first wanted")
    overlap: bool = key(True, "launch the next step while one runs; false: one after another, the same answers")
    mla_workspace_tokens: int = key(32768, "rows of expanded keys and values that MLA prefill holds at a time")
    step_timeout_s: float = key(300.0, "the watchdog speaks when one stage of a step takes longer")
    force_preempt_every: int = key(0, "tests: preempt the newest running request every so many steps; 0: never")
    seed: int = key(0, "weights of load_format=dummy")


@dataclass
class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = key(16, "token positions of one block")
    num_blocks: int | None = key(None, "null: from memory_fraction (GPU) or cpu_gb (CPU)")
    dtype: str = key("auto", "auto: the model's; fp8 (a scale a row), fp8-layer (scales given), int4 (a quarter)")
    scales: str | None = key(None, "fp8-layer: JSON file of each layer's scales; null: the checkpoint's own, else 1.0")
    prefix_caching: bool = key(True, "reuse the blocks of equal prompt beginnings")
    memory_fraction: float = key(0.9, "share of the GPU's memory that weights, buffers and cache may use together")
    cpu_gb: float = key(1.0, "GiB of cache on the CPU")


@dataclass
class ParallelConfig(Section):
    """Experts over the ranks that torchrun starts. With one rank nothing here has an effect."""

    dispatcher: str = key(
        "auto", "how rows travel: auto, local (one rank), all_to_all, all_gather; on GPUs also one_sided, deep_ep"
    )
    combine: str = key("exact", "exact: the same bits whatever the number of ranks; fast: fewer bytes, other bits")
    row_cap: int | None = key(None, "most rows of a buffer in one round; null: 2 x engine.max_batched_tokens x top_k")
    overlap: str = key("auto", "auto, none, shared (experts, while rows travel: GPU) or halves (of a step, in turns)")
    overlap_rows: int | None = key(None, "overlap=halves: split steps in which a rank has so many rows; null: 8192")
    timeout_s: float = key(600.0, "a start or a collective that takes longer ends the run")


@dataclass
class BalanceConfig(Section):
    """The experts' load, and experts that move between ranks to make it even. With one rank nothing moves."""

    interval: int = key(0, "look at the experts' load every so many steps; 0: once, at the end, and experts stay")
    move: str = key("gain", "after a look experts move: gain (where that saves more than it costs), always or never")
    window: int = key(8, "looks that a decision is made from, and that balance.load_file holds")
    layers_per_step: int = key(1, "most layers whose experts move between two steps")
    buffer_mb: float = key(256.0, "MiB that a rank holds for experts on their way; at least three experts' worth")
    redundant_experts: int = key(0, "slots of all ranks beyond one for each expert: for replicas of busy ones")
    plan: str | None = key(None, "a file of placements: experts are loaded there, and stay")
    profile: str | None = key(None, "write the placements that suit the first balance.profile_steps steps to this file")
    profile_steps: int = key(256, "steps that balance.profile looks at")
    load_file: str | None = key(None, "write the experts' load and the ranks' balance over time to this JSON file")


@dataclass
class OffloadConfig(Section):
    """Experts in host memory, for models larger than the GPUs: docs/offload.md."""

    regime: str = key(
        "off", "off: all experts on the GPU; else in host memory: auto, cache (few rows) or stream (many)"
    )
    slots_per_layer: int | None = key(None, "expert slots of a layer that are held on the GPU; null: gpu_gb, or auto")
    gpu_gb: float | None = key(None, "GiB for experts on a GPU; null: what weights, steps and the wanted cache leave")
    host_gb: float | None = key(None, "GiB of pinned memory of a host, shared by its ranks; null: what is needed")
    tier: str = key("host", "host: all experts in pinned memory; disk: read from their files through host_gb")
    tokens_per_seq: int | None = key(
        None, "auto: tokens of a sequence that the cache gets room for; null: 1024, or engine.max_model_len where lower"
    )


@dataclass
class JobConfig(Section):
    """The job around the file."""

    strict: bool = key(False, "check every line first; a bad one stops the job before the model is loaded")
    limit: int | None = key(None, "only the first so many lines")
    resume: str = key("auto", "an unfinished run: auto (go on), require, never, or force (though settings differ)")
    retry_errors: bool = key(False, "a run that goes on tries lines with error records again")
    overwrite: bool = key(False, "replace an output that exists, and an unfinished run of other settings")
    max_errors: int | None = key(None, "stop when more lines than so many have failed")
    line_timeout_s: float | None = key(None, "a line that is in the engine for longer gets an error record")
    shards: int = key(1, "files of the output, NAME-00001-of-0000N, of equally many lines each")
    report: str | None = key(None, "a folder for report.html, metrics.json and metrics.prom; made if need be")
    report_every_s: float = key(60.0, "write them again so often while the job runs")
    quiet: bool = key(False, "print nothing but warnings and errors")
    chat_template: str | None = key(None, "a file or a template text, for checkpoints without one")
    dry_run: bool = key(False, "read, tokenize and count every line, load no weights")
    more_input: list[str] = key([], "further files or patterns, read after input")
    columns: list[str] = key([], "FIELD:COLUMN of each field to be read from a table, or from lines with other names")
    order: str = key("auto", "auto, file (as in the input) or prefix (equal beginnings together, long answers first)")
    look_ahead: int = key(8192, "lines that job.order=prefix rearranges at a time")
    look_ahead_mb: float = key(32.0, "MiB of them at most; two such windows are in memory")

    @property
    def resume_mode(self) -> str:
        """`resume`, with its two short forms written out."""
        return {"true": "auto", "false": "never"}.get(self.resume, self.resume)


@dataclass
class Config(Section):
    """The whole command line."""

    model: str = key("demo", "a folder, a hub id, or demo, demo-deepseek")
    revision: str | None = key(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = key(None, "folder or hub id of another tokenizer than the checkpoint's")
    input: str | None = key(None, "prompts: a file, a pattern like 'a/*.jsonl', - (stdin); null: the demo's prompts")
    output: str | None = key(None, "file of answers, JSONL or .parquet; null: NAME.answers.jsonl in the current folder")
    dtype: str = key("auto", "auto, bfloat16, float16 or float32")
    load_format: str = key("auto", "auto, safetensors or dummy (weights from engine.seed)")
    quantization: str = key("auto", "routed experts: auto (as stored), fp8 (in blocks of 128 x 128) or none (in dtype)")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    job: JobConfig = field(default_factory=JobConfig)


TYPE_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list[str]": "a list of texts",
    "list[int]": "a list of whole numbers",
}


@dataclass(frozen=True)
class Key:
    """One key of the command line, for help texts and error messages."""

    name: str  # dotted
    type: str  # as annotated, e.g. `int | None`
    default: Any
    help: str

    @property
    def nullable(self) -> bool:
        return "None" in self.type

    @property
    def base(self) -> str:
        """The type without None: str, int, float, bool, list[str] or list[int]."""
        return self.type.replace(" | None", "")

    @property
    def words(self) -> str:
        """The type in words, e.g. `a whole number or null`."""
        return TYPE_WORDS[self.base] + (" or null" if self.nullable else "")


def known_keys() -> tuple[Key, ...]:
    """Every key in the order of the schema."""
    found: list[Key] = []

    def visit(section: object, prefix: str) -> None:
        assert is_dataclass(section), f"{section!r} is no section"
        for item in fields(section):
            value = getattr(section, item.name)
            if isinstance(value, Section):
                visit(value, f"{prefix}{item.name}.")
            else:
                found.append(Key(prefix + item.name, str(item.type), value, item.metadata["help"]))

    visit(Config(), "")
    return tuple(found)


def owner_of(config: Config, key: str) -> tuple[Any, str]:
    """The section that holds a key, and the key's name there: what `setattr` takes, as `attrgetter` takes the key."""
    section, _, name = key.rpartition(".")
    return (getattr(config, section) if section else config), name


def changed_keys(config: Config) -> tuple[str, ...]:
    """The keys whose values are not the defaults, in the order of the schema."""
    return tuple(key.name for key in known_keys() if attrgetter(key.name)(config) != key.default)
