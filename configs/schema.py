"""Every key of the command line and of `LLM(...)`, as plain dataclasses. Checked and frozen once, never edited after.

Knows nothing of Hydra (registration is in `launch/`), torch or models: standard library and omegaconf only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SamplingConfig:
    """Defaults of every line; None takes the checkpoint's generation_config (chats) or the neutral value."""

    max_tokens: int | None = None  # None: as many as max_model_len leaves
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # job seed: a line's seed is a hash of it, the line's id and the sample's index
    n: int = 1
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass
class EngineConfig:
    """Sizes and behaviour of the engine."""

    device: str = "auto"  # auto | cuda | cpu
    max_model_len: int | None = None  # None: the checkpoint's max_position_embeddings
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    prefill_chunk: int | None = None  # most prompt tokens of one request in one step; None: the token budget
    cuda_graphs: bool = False
    mla_workspace_tokens: int = 32768  # rows of expanded keys and values that MLA prefill holds at a time
    step_timeout_s: float = 300.0  # the watchdog speaks after this
    force_preempt_every: int = 0  # tests: preempt the newest running request every so many steps
    seed: int = 0  # weights of load_format=dummy


@dataclass
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    num_blocks: int | None = None  # None: from memory_fraction (GPU) or cpu_gb (CPU)
    dtype: str = "auto"
    prefix_caching: bool = True
    memory_fraction: float = 0.9
    cpu_gb: float = 1.0


@dataclass
class ParallelConfig:
    """Experts over ranks. One rank today: `local`; the other dispatchers stand behind the same key."""

    dispatcher: str = "auto"
    combine: str = "exact"
    row_cap: int | None = None
    timeout_s: float = 600.0


@dataclass
class JobConfig:
    """The job around the file."""

    strict: bool = False  # a bad line stops the job before the model is loaded
    limit: int | None = None  # only the first so many lines
    report: str | None = None  # where to write the summary as JSON
    chat_template: str | None = None  # a file or a template text, for checkpoints without one
    window: int = 1024  # lines read ahead of the oldest unfinished one
    dry_run: bool = False  # read and check every line, load no model


@dataclass
class Config:
    """The whole command line."""

    model: str = "demo"
    revision: str | None = None
    tokenizer: str | None = None
    input: str | None = None
    output: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"  # auto | safetensors | dummy
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    job: JobConfig = field(default_factory=JobConfig)
