"""What a caller asks and what comes back: sampling parameters, requests, outputs.

Knows names, ranges and defaults; knows nothing of text, tokens' meaning, tensors or the engine.
The names are those of OpenAI's API and vLLM's Python API.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from configs.checks import SAMPLING_RANGES, Range, in_range

FinishReason = Literal["stop", "length", "abort", "error"]

# A temperature below this is greedy decoding: dividing by it overflows fp32 long before it could change a draw.
GREEDY_TEMPERATURE = 1e-5
NEVER = 2**62
# Parameters that are whole numbers; the rest of SAMPLING_RANGES may have fractions.
WHOLE = frozenset(("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"))


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Checked when made; a wrong value is a ValueError naming the field.

    Fields that a checkpoint's generation_config can set are None until set; `merged` fills them, and what is still None
    counts as neutral: temperature 1, top_p 1, top_k 0 (off), min_p 0, repetition_penalty 1, max_tokens unlimited.
    Order of the stages: logit_bias, min_tokens, penalties, temperature, top_k, top_p, min_p, draw.
    """

    n: int = 1  # independent samples
    max_tokens: int | None = None  # None: as many as the model's length leaves
    min_tokens: int = 0  # end-of-sequence and stop ids are masked, stop strings ignored, until so many tokens
    temperature: float | None = None  # 0: greedy, the lowest id among equal logits
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: derived from the job's seed, the request's id and the sample's index
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # so many most likely tokens beside the chosen one; 0: the chosen one alone
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep only the last so many prompt tokens

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, Iterator):  # it can be read once, and the checks would leave nothing of it
                object.__setattr__(self, name, list(value))
        self.check()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.logit_bias is not None:  # JSON has only string keys
            object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in self.logit_bias.items()})

    def check(self) -> None:
        """Raise ValueError for the first field out of its range or in conflict with another."""
        for name, allowed in SAMPLING_RANGES.items():
            value = getattr(self, name)
            if value is not None:
                (_check_int if name in WHOLE else _check_float)(name, value, allowed)
        _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, Range(1))
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false.")
        for name in ("n", "min_tokens", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None is no value; leave it out for the default.")
        _check_stops(self.stop, self.stop_token_ids, self.detokenize)
        _check_bias(self.logit_bias)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower one or raise the other."
            )

    @property
    def penalizes(self) -> bool:
        """Whether any penalty moves logits, so that the tokens so far must be counted."""
        return self.repetition_penalty not in (None, 1.0) or bool(self.presence_penalty or self.frequency_penalty)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError where an id does not exist in the model's vocabulary, or none is left to be drawn."""
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size:
            raise ValueError(
                f"min_tokens={self.min_tokens} rules out stop_token_ids at first, and these are all {vocab_size} ids "
                "of the vocabulary; leave one of the two out."
            )
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise ValueError(f"stop_token_ids has {token_id}, outside the model's vocabulary of {vocab_size} ids.")
        for token_id in self.logit_bias or ():
            if token_id >= vocab_size:
                raise ValueError(f"logit_bias has id {token_id}, outside the model's vocabulary of {vocab_size} ids.")

    def merged(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These params with every field that is None taken from `defaults` where that has it (and it is not None)."""
        _check_names(defaults)
        filled = {name: value for name, value in defaults.items() if value is not None and getattr(self, name) is None}
        return replace(self, **filled) if filled else self

    @classmethod
    def from_layers(cls, *layers: Mapping[str, Any]) -> SamplingParams:
        """Params from dicts of fields, a later one over an earlier one; None is "not set" and overrides nothing."""
        chosen: dict[str, Any] = {}
        for layer in layers:
            _check_names(layer)
            chosen.update({name: value for name, value in layer.items() if value is not None})
        return cls(**chosen)

    @property
    def greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_TEMPERATURE

    @property
    def plain_from(self) -> int:
        """Number of generated tokens from which on the next is drawn from the raw logits, and nothing else is asked of
        them: no edit, no cut, no log-probabilities. NEVER where something always is."""
        cut = not self.greedy and bool((self.top_k or 0) > 0 or (self.top_p or 1.0) < 1.0 or self.min_p)
        if cut or self.penalizes or self.logit_bias or self.logprobs is not None:
            return NEVER
        return self.min_tokens


_NAMES = frozenset(item.name for item in fields(SamplingParams))


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token, and its rank (1: the most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# One dict a position: the chosen (or prompt) token, and the most likely ones. The first prompt position has none.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request, so far or whole. `stop_reason`: the stop string or id that ended it; None for EOS."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one request, so far or whole. `error` says why, where an output's finish_reason is "error".

    `rejected`: it could never have run (too long, an id the model lacks), so nothing was computed and asking again is
    of no use; False with an `error`: it failed on the way.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    rejected: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt, already as token ids, and how to sample it. n > 1 becomes n sequences in the engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    arrival: float = field(default_factory=time.monotonic)  # seconds on the monotonic clock
    job_seed: int = 0
    seed: int | None = None  # over params.seed, so that requests which differ in it alone share their params

    def seed_of(self, index: int) -> int:
        """The seed of sample `index`: the request's itself for the first, derived for the rest; else from the job's."""
        seed = self.params.seed if self.seed is None else self.seed
        if seed is None:
            return derive_seed(self.job_seed, self.request_id, index)
        return seed if index == 0 else derive_seed(seed, index)


def digest_of(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> str:
    """The same for the same prompts and parameters in the same order, in every process."""
    digest = hashlib.blake2b(digest_size=16)
    texts: dict[int, bytes] = {}  # many requests share one object
    for ids, each in zip(prompts, params, strict=True):
        if id(each) not in texts:
            texts[id(each)] = repr(each).encode("utf-8", "surrogatepass")
        digest.update(texts[id(each)])
        digest.update(array("q", [len(ids), *ids]).tobytes())
    return digest.hexdigest()


class Seeds:
    """63-bit seeds from another one and names: the same on every machine and in every Python."""

    def __init__(self, seed: int) -> None:
        self._digest = hashlib.blake2b(str(seed).encode(), digest_size=8)

    def of(self, *parts: str | int) -> int:
        digest = self._digest.copy()
        for part in parts:
            digest.update(f"\0{type(part).__name__}:{part}".encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest(), "little") >> 1


def derive_seed(seed: int, *parts: str | int) -> int:
    """One of them; of many from the same seed, see Seeds."""
    return Seeds(seed).of(*parts)


def _check_int(name: str, value: Any, allowed: Range) -> None:
    """None passes; True is no number."""
    if value is None:
        return
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and in_range(value, *allowed):
        return
    words = f"from {allowed.low} to {allowed.high}" if allowed.high is not None else f"of at least {allowed.low}"
    if not is_number:
        raise ValueError(f"{name}={value!r} must be a whole number {words}.")
    raise ValueError(f"{name}={_shown(value)} is out of range; give a whole number {words}.")


def _check_float(name: str, value: Any, allowed: Range) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and in_range(value, *allowed):
        return
    words = f"{'above' if allowed.low_open else 'from'} {allowed.low:g} to {allowed.high:g}"
    if not is_number:
        raise ValueError(f"{name}={value!r} must be a number {words}.")
    raise ValueError(f"{name}={_shown(value)} is out of range; give a finite number {words}.")


def _shown(value: float) -> str:
    """A number for a message; JSON may hold one of thousands of digits."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def _shown_key(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:20]}..."


def _check_stops(stop: object, stop_token_ids: object, detokenize: bool) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | Mapping):
        raise ValueError(f"stop={stop!r} must be a string or a list of strings.")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"stop has {text!r}, which is no string; give ids as stop_token_ids.")
        if not text:
            raise ValueError(f"stop={stop!r} has an empty string, which would match everywhere; leave it out.")
    if texts and not detokenize:
        raise ValueError(
            f"stop={stop!r} needs text, but detokenize=False makes none; use stop_token_ids or detokenize=True."
        )
    if not isinstance(stop_token_ids, Sequence) or isinstance(stop_token_ids, str | bytes):
        raise ValueError(f"stop_token_ids={stop_token_ids!r} must be a list of token ids.")
    for token_id in stop_token_ids:
        _check_int("stop_token_ids", -1 if token_id is None else token_id, Range(0))


def _check_bias(logit_bias: object) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"logit_bias={logit_bias!r} must map token ids to numbers.")
    for key, value in logit_bias.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        if isinstance(key, bool) or not (isinstance(key, int) or digits):
            raise ValueError(f"logit_bias has key {_shown_key(key)}, which is no token id.")
        _check_int("logit_bias key", int(key), Range(0))
        if value is None:
            raise ValueError(f"logit_bias[{key}]=None is no number.")
        _check_float(f"logit_bias[{key}]", value, Range(-100, 100))
    if len(set(map(int, logit_bias))) < len(logit_bias):
        raise ValueError(f"logit_bias={dict(logit_bias)!r} names one token id twice, in two spellings; give it once.")


def _check_names(values: Mapping[str, Any]) -> None:
    for name in values:
        if name not in _NAMES:
            raise ValueError(f"{name!r} is no sampling parameter; known are {', '.join(sorted(_NAMES))}.")
