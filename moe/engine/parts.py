"""What an engine is put together from: network, description, tokenizer, device. Loads them from a config.

Knows where a checkpoint's parts lie and which dtype, device and length they get; knows nothing of requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from configs.schema import Config, EngineConfig
from expert_parallel.choice import dispatcher_problems
from expert_parallel.group import Ranks
from kernels.checks import cdiv
from kv_cache.layout import KVLayout, LayerScales
from moe.engine.balance import check_files
from moe.engine.forecast import Forecast, Subject, forecast
from moe.engine.machine import Machine, find_machine
from moe.engine.memory_plan import GIB
from moe.engine.network import Network
from moe.engine.request import SamplingParams
from moe.engine.resolve import kv_layout, resolve_dtype, resolve_max_model_len
from moe.engine.tokenizer import Tokenizer
from moe.engine.workspace import StepLimits
from moe.model.cache_scales import find_cache_scales
from moe.model.causal_lm import CausalLM
from moe.model.config import ModelConfig
from moe.model.families.registry import read_config
from moe.model.hub import resolve_model, resolve_tokenizer
from moe.model.load_model import Spread, load_model, open_model
from moe.model.offloaded_experts import Offload
from moe.model.overlap import choose_overlap

logger = logging.getLogger(__name__)

# Answers in progress where the config leaves it open: a GPU's step takes less than twice as long for twice the rows.
GPU_NUM_SEQS, CPU_NUM_SEQS = 1024, 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Parts:
    """`tokenizer` None: the checkpoint has none; such an engine takes token ids and gives token ids."""

    network: Network
    model: ModelConfig
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    name: str = ""
    ranks: Ranks | None = None  # those that share the experts; None: this process is alone
    cache_scales: tuple[LayerScales, ...] = ()  # of each layer, where cache.dtype=fp8-layer
    forecast: Forecast | None = None  # what was planned before it was loaded

    @property
    def eos_ids(self) -> frozenset[int]:
        """The union of all the sources that name one; what the model has no row for is never drawn, nor masked."""
        ids = frozenset(self.model.eos_token_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        return frozenset(each for each in ids if 0 <= each < self.model.vocab_size)

    @property
    def graph_safe(self) -> bool:
        """Whether decode steps may be captured: no dispatcher waits for the host or has shapes that follow routing, and
        experts that come from host memory are copied as the device decides."""
        if not isinstance(self.network, CausalLM):
            return True
        offload = self.network.offload
        alone = self.ranks is None or self.ranks.everyone.size == 1
        decided = offload is None or (alone and offload.captures(self.model.moe.rule.top_k))
        return self.network.dispatchers.decode.graph_safe and decided

    @property
    def offload(self) -> Offload | None:
        """The experts that live in host memory; None: all are on the device."""
        return self.network.offload if isinstance(self.network, CausalLM) else None

    @property
    def experts_of_slots(self) -> Mapping[int, Sequence[int | None]] | None:
        """The logical expert in each slot here, layer by layer; None: slot e holds expert e."""
        return self.network.layout.experts if isinstance(self.network, CausalLM) else None

    def buffer_bytes(self, num_tokens: int) -> int:
        """The most that travelling rows take, where each rank brings up to `num_tokens` rows to a step."""
        if not isinstance(self.network, CausalLM):
            return 0
        at_a_time = self.network.overlap.rounds_open(num_tokens)
        rows = cdiv(num_tokens, at_a_time)
        return at_a_time * self.network.dispatchers.buffer_bytes(rows, self.model.hidden_size, self.dtype)

    @property
    def row_cap(self) -> int | None:
        """The most rows of a buffer between ranks in one round; None with one rank."""
        return self.network.dispatchers.prefill.row_cap if isinstance(self.network, CausalLM) else None

    @property
    def held_bytes(self) -> int:
        """Of buffers for travelling rows that exist and that no allocator's statistics show."""
        return self.network.dispatchers.held_bytes if isinstance(self.network, CausalLM) else 0

    @property
    def held_expert_bytes(self) -> int | None:
        """On the device, of experts that live in host memory; None: none lives there."""
        return None if self.offload is None else self.offload.gpu_bytes

    def limits(self, config: Config) -> StepLimits:
        """Of the largest steps."""
        return step_limits(config, self.max_model_len, self.device)

    def check_ranks(self) -> None:
        """RuntimeError where the device waited for another rank in vain. Waits for nobody."""
        if isinstance(self.network, CausalLM):
            self.network.dispatchers.check()

    def close_ranks(self) -> None:
        """After the last step, on every rank: what travelling rows needed and a library wants back."""
        if isinstance(self.network, CausalLM):
            self.network.dispatchers.close()

    def max_num_seqs(self, engine: EngineConfig) -> int:
        """Of the key, or the device's default, but not more than a step's token budget: decoding takes a token each."""
        return max_num_seqs(engine, self.device)

    def decode_one(self, token_id: int) -> str:
        """The text of one token by itself, special ones included."""
        assert self.tokenizer is not None, "texts of tokens were asked of parts without a tokenizer"
        return self.tokenizer.token_text(token_id)


def max_num_seqs(engine: EngineConfig, device: torch.device) -> int:
    """Of the key, or the device's default, but not more than a step's token budget: decoding takes a token each."""
    most = engine.max_num_seqs or (GPU_NUM_SEQS if device.type == "cuda" else CPU_NUM_SEQS)
    return min(most, engine.max_batched_tokens)


def step_limits(config: Config, max_model_len: int, device: torch.device) -> StepLimits:
    """Of the largest steps of an engine on `device`."""
    engine = config.engine
    return StepLimits(
        max_batched_tokens=engine.max_batched_tokens,
        max_num_seqs=max_num_seqs(engine, device),
        max_model_len=max_model_len,
        block_size=config.cache.block_size,
        mla_tokens=engine.mla_workspace_tokens,
    )


class LoadProgress:
    """Says every few seconds how much of the weights is read; a load shorter than that says nothing."""

    def __init__(self, every_s: float = 5.0) -> None:
        self.every_s = every_s
        self.started = self.told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.told < self.every_s:
            return
        self.told = now
        rate = done / (now - self.started)
        logger.info("read %.1f of %.1f GB of weights, %.1f GB/s", done / 1e9, total / 1e9, rate / 1e9)


@dataclass(frozen=True)
class Outline:
    """What is known of an engine's parts before any weight is read."""

    folder: Path
    model: ModelConfig
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    cache_scales: tuple[LayerScales, ...]
    layout: KVLayout


def outline_parts(config: Config, device: torch.device) -> Outline:
    """Everything that `config` names but the weights. ValueError for a wrong key."""
    folder = resolve_model(config.model, config.revision)
    model = read_config(folder)
    dtype = resolve_dtype(config.dtype, model.dtype, device)
    max_model_len = resolve_max_model_len(config.engine.max_model_len, model)
    tokenizer_folder = resolve_tokenizer(config.tokenizer) if config.tokenizer is not None else folder
    tokenizer = None
    if any((tokenizer_folder / file).is_file() for file in TOKENIZER_FILES):
        tokenizer = Tokenizer(folder, tokenizer_folder=tokenizer_folder, chat_template=config.job.chat_template)
        _warn_of_tokenizer(tokenizer, tokenizer_folder, model)
    else:
        logger.warning("%s holds no tokenizer: prompts must be token ids, answers have no text", tokenizer_folder)
    cache = config.cache
    weights = None if config.load_format == "dummy" else folder
    cache_scales = find_cache_scales(cache.dtype, cache.scales, weights, model, dtype)
    layout = kv_layout(model, cache.block_size, dtype, cache.dtype, device, cache_scales)
    return Outline(folder, model, tokenizer, dtype, device, max_model_len, cache_scales, layout)


def _warn_of_tokenizer(tokenizer: Tokenizer, folder: Path, model: ModelConfig) -> None:
    """What some prompts will meet, said before the first."""
    if not tokenizer.has_chat_template:
        logger.warning("%s holds no chat template: messages need one as job.chat_template=", folder)
    beyond = [each for each in (*tokenizer.eos_ids, *model.eos_token_ids) if not 0 <= each < model.vocab_size]
    if beyond:
        logger.warning(
            "%s: id %d is said to end a text, but the model's vocabulary has %d ids: it never will; does the tokenizer "
            "belong to this model?",
            *(folder, beyond[0], model.vocab_size),
        )
    for name, value in tokenizer.generation_defaults.items():
        try:
            SamplingParams.from_layers({name: value})
        except ValueError as error:
            logger.warning("generation_config.json of %s fails chats that do not give %s: %s", folder, name, error)
    if tokenizer.not_honoured:
        said = ", ".join(f"{name}={value!r}" for name, value in tokenizer.not_honoured.items())
        logger.warning(
            "generation_config.json of %s asks chats for %.200s, which is not offered here: they are answered without",
            *(folder, said),
        )


def load_parts(config: Config, ranks: Ranks | None = None) -> Parts:
    """Everything that `config` names, on its device. ValueError for a wrong key, before any weight is read.

    `ranks`: these share the experts; each process holds its part of them, and all else.
    """
    if ranks is None or ranks.everyone.rank == 0:
        check_files(config.balance)  # the first rank writes them
    if config.balance.plan is not None and (ranks is None or ranks.everyone.size == 1):
        logger.warning("balance.plan=%s is not loaded: one rank holds every expert.", config.balance.plan)
    outline = outline_parts(config, resolve_device(config.engine.device) if ranks is None else ranks.device)
    opened = open_model(outline.folder, config.load_format, config.quantization, outline.device)
    asks_host = config.offload.regime != "off" or outline.device.type == "cpu"
    machine = find_machine(outline.device, ranks, asks_host=asks_host)
    if ranks is not None and ranks.everyone.size > 1:
        deep_ep = config.parallel.dispatcher == "deep_ep"
        machine = replace(machine, problems=dispatcher_problems(ranks.everyone, outline.device, deep_ep=deep_ep))
    planned = _forecast(config, outline, opened.config, machine)
    network = load_model(
        outline.folder,
        dtype=outline.dtype,
        device=outline.device,
        load_format=config.load_format,
        quantization=config.quantization,
        seed=config.engine.seed,
        max_model_len=outline.max_model_len,
        mla_workspace_tokens=config.engine.mla_workspace_tokens,
        progress=LoadProgress(),
        spread=None if ranks is None else _spread(config, ranks, machine),
        overlap=choose_overlap(config.parallel, 1, outline.device),
        offload=planned.offload,
        opened=opened,
    )
    if ranks is not None:
        ranks.meet("load")  # says for whom it waits; the first collective would only time out
    return Parts(
        network,
        network.config,
        outline.tokenizer,
        outline.dtype,
        outline.device,
        outline.max_model_len,
        name=config.model,
        ranks=ranks,
        cache_scales=outline.cache_scales,
        forecast=planned,
    )


def _forecast(config: Config, outline: Outline, model: ModelConfig, machine: Machine) -> Forecast:
    """What the engine will take, and which experts it holds on its GPU. ValueError where its weights cannot fit."""
    limits = step_limits(config, outline.max_model_len, outline.device)
    planned = forecast(config, Subject(model, outline.dtype, outline.layout, limits), machine)
    if machine.total is not None and planned.weight_bytes + machine.other > machine.total:
        raise ValueError(planned.problem or "the weights exceed the GPU's memory")
    if machine.total is None:
        _check_host(planned, machine)
    if planned.offload is not None:
        logger.info("%s", planned.offload.words())
    elif config.offload.regime != "off":
        logger.info("offload.regime=%s: all experts have room on the device, and stay there", config.offload.regime)
    return planned


def _check_host(planned: Forecast, machine: Machine) -> None:
    """ValueError where the CPU's weights have no room: the kernel would end the process without a word."""
    assert machine.host is not None, "the CPU's memory was not looked at"
    each, available = planned.weight_bytes + planned.host_bytes, machine.host.available
    if each * machine.ranks_here > available:
        ranks = "" if machine.ranks_here == 1 else f" on each of {machine.ranks_here} ranks"
        raise ValueError(
            f"the weights take {each / GIB:.3f} GiB{ranks}, and {machine.host.source} leaves "
            f"{available / GIB:.3f} GiB; use a machine with a GPU or more memory, a smaller model, or dtype=bfloat16."
        )


def _spread(config: Config, ranks: Ranks, machine: Machine) -> Spread:
    most = config.engine.max_batched_tokens
    return Spread(ranks.everyone, config.parallel, most, config.balance, machine.problems)


def resolve_device(name: str) -> torch.device:
    """auto: the GPU where there is one."""
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"engine.device={name!r} is not known; use auto, cuda or cpu.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device='cuda', but torch sees no NVIDIA GPU; use engine.device=cpu or auto.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
