"""The Python API: `LLM(...)` with `generate`, `chat`, `stream`, `abort`, `get_tokenizer` and `close`.

Knows prompts in every form people hold them in, and whose answer is whose; the engine does the rest. Calls from several
threads, and streams read in turns, share the steps: whoever waits runs one, and every output goes to its owner's box.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from rich.progress import Progress

from configs.checks import freeze
from configs.schema import CacheConfig, Config, EngineConfig, SamplingConfig, changed_keys
from configs.torchrun import rank_environment
from moe.engine.ctrl_c import kept_until_done
from moe.engine.engine import Engine
from moe.engine.memory_plan import MemoryPlan
from moe.engine.parts import Parts
from moe.engine.request import Request, RequestOutput, SamplingParams, digest_of
from moe.engine.stats import EngineStats
from moe.engine.team import Team
from moe.engine.tokenizer import Tokenizer

# Keys of a job and of its lines, which a call of the API says for itself.
JOB_KEYS = ("input", "output", "job.", "sampling.")
USED_JOB_KEYS = ("job.chat_template", "sampling.seed")

# A prompt: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as a dict.
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Ids:
    """A prompt ready for the engine."""

    token_ids: list[int]
    text: str | None


class LLM:
    """A model that answers prompts.

    Example:
        with LLM(model="demo") as llm:
            for output in llm.generate(["In the beginning", "And the"], SamplingParams(max_tokens=16)):
                print(output.outputs[0].text)

    Args:
        model: a folder, a hub id, or "demo" / "demo-deepseek", the small models that come with this package.
        revision: of a hub id. tokenizer: a folder or hub id to take the tokenizer from instead of the model's.
        dtype: "auto" is the checkpoint's own on a GPU and float32 on the CPU.
        load_format: "auto", "safetensors", or "dummy" (weights drawn from `seed`).
        quantization: of routed experts: "auto" as the checkpoint stores them, "fp8", or "none" (in dtype).
        max_model_len: prompt and answer together; None is the checkpoint's max_position_embeddings.
        seed: of dummy weights, and of requests without their own: such a request draws from (seed, its id, sample).
        device: "auto" is the GPU where there is one.
        block_size, num_blocks, memory_fraction, cpu_gb, kv_cache_dtype, kv_cache_scales, enable_prefix_caching: the
            KV cache, see configs.schema.
        max_num_seqs, max_batched_tokens, prefill_chunk: what one step may hold.
        cuda_graphs: replay decode steps, on a GPU.
        force_preempt_every, parts: for tests: see configs.schema; a network and tokenizer that are loaded already.
        config: everything at once, instead of all the arguments above; it is checked and closed. Of its keys for jobs
            and lines only job.chat_template and sampling.seed mean something here; others are refused.

    The same prompt, seed and model give the same token ids whatever else is asked at the same time.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        quantization: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        device: str = "auto",
        block_size: int = CacheConfig.block_size,
        num_blocks: int | None = None,
        memory_fraction: float = CacheConfig.memory_fraction,
        cpu_gb: float = CacheConfig.cpu_gb,
        kv_cache_dtype: str = CacheConfig.dtype,
        kv_cache_scales: str | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int | None = EngineConfig.max_num_seqs,
        max_batched_tokens: int = EngineConfig.max_batched_tokens,
        prefill_chunk: int | None = None,
        cuda_graphs: bool = EngineConfig.cuda_graphs,
        force_preempt_every: int = 0,
        config: Config | None = None,
        parts: Parts | None = None,
    ) -> None:
        asked = Config(
            model=model,
            revision=revision,
            tokenizer=tokenizer,
            dtype=dtype,
            load_format=load_format,
            quantization=quantization,
            sampling=SamplingConfig(seed=seed),
            engine=EngineConfig(
                device=device,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_batched_tokens=max_batched_tokens,
                prefill_chunk=prefill_chunk,
                cuda_graphs=cuda_graphs,
                force_preempt_every=force_preempt_every,
                seed=seed,
            ),
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                dtype=kv_cache_dtype,
                scales=kv_cache_scales,
                prefix_caching=enable_prefix_caching,
                memory_fraction=memory_fraction,
                cpu_gb=cpu_gb,
            ),
        )
        if config is not None:
            _check_config_alone(config, asked)
        self.config = freeze(asked if config is None else config)
        self._team = _team(self.config, parts)
        try:
            ranks = None if self._team is None else self._team.ranks
            self._engine: Engine | None = Engine(self.config, parts=parts, ranks=ranks)
        except Exception as error:
            if self._team is not None:
                self._team.abandon(error, lives_on=True)
            raise
        self._lock = threading.RLock()
        self._boxes: dict[str, deque[RequestOutput]] = {}
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        own_share: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts; the results are in the order of the prompts, whatever order they end in.

        A prompt is a text, a list of token ids, or a dict with "prompt" or "prompt_token_ids". `params` is one for all,
        or a list with one for each. A prompt that cannot be answered (too long, say) gives an output with `.error` set
        and finish_reason "error"; arguments of a wrong form raise ValueError before anything runs.

        In a script that torchrun starts, every rank calls this with the same prompts, answers its share of them (every
        N-th), and gets all results; with `own_share` those of its share alone.
        """
        if not _is_one_prompt(prompts) and not isinstance(prompts, Iterable):
            raise ValueError(f"prompts={prompts!r} must be a text, a list of token ids, a dict, or a list of these.")
        listed: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        ready = [self._encode(prompt, index) for index, prompt in enumerate(listed)]
        return self._answer_all(ready, _params_list(params, len(ready)), progress=progress, own_share=own_share)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the checkpoint's chat template.

        Sampling fields left at None come from the checkpoint's generation_config. `add_generation_prompt` None: yes,
        unless the final message is to be continued. ValueError, before anything runs, where there is no template or it
        refuses a conversation.
        """
        listed = list(messages)
        chats: list[Any] = [listed] if listed and isinstance(listed[0], Mapping) else listed
        tokenizer = self.get_tokenizer()
        ready = [
            _Ids(
                tokenizer.render_chat(
                    each,
                    tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                ),
                None,
            )
            for each in chats
        ]
        merged = [each.merged(tokenizer.generation_defaults) for each in _params_list(params, len(ready))]
        return self._answer_all(ready, merged, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt piece by piece: after each new token an output with everything so far (cumulative).

        The last one has `finished=True`. Leaving the loop early aborts the request. With `request_id` another thread,
        or the loop's own body, can `abort` it; the last output then has finish_reason "abort".
        """
        ready = self._encode(prompt, 0)
        engine = self._open()
        if self._team is not None:
            raise ValueError(f"stream() answers on one rank, but {self._team.size} share the experts; use generate().")
        request_id = request_id if request_id is not None else self._next_id()
        return self._stream(engine, self._request(request_id, ready, params or SamplingParams()))

    def abort(self, request_id: str) -> bool:
        """End a request; its owner gets what it had, with finish_reason "abort". False where no such request runs."""
        engine = self._open()
        with self._lock, kept_until_done():
            return engine.abort(request_id)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use; `.hf` is transformers' own object. ValueError where the checkpoint has none."""
        tokenizer = self._open().tokenizer
        if tokenizer is None:
            raise ValueError(f"model={self.config.model!r} has no tokenizer; give one as tokenizer=, or use token ids.")
        return tokenizer

    @property
    def engine(self) -> Engine:
        """The engine inside, for those who drive it themselves."""
        return self._open()

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._open().plan

    def stats(self) -> EngineStats:
        """Counters since the start, the experts' load included."""
        with self._lock:
            return self._open().count_experts()

    def close(self) -> None:
        """Give memory and threads back. Any later call raises RuntimeError; closing twice is fine."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._boxes.clear()
        if engine is None:
            return
        in_order = self._team is None or not self._team.closed
        if in_order:
            engine.conclude()
        engine.close()
        if self._team is not None:
            self._team.close()
        on_gpu = engine.parts.device.type == "cuda"
        del engine
        if on_gpu and in_order:  # it waits for the device, which may wait for ranks that are gone
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._team is not None:
            self._team.abandon(error, lives_on=True)  # the others may be anywhere: they are told, not waited for
        self.close()

    def _open(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise RuntimeError("this LLM is closed; make a new one.")
        return engine

    def _encode(self, prompt: Prompt, index: int) -> _Ids:
        """Token ids of a prompt in any form; ValueError names its place in the list."""
        self._open()
        given: object = prompt
        text: str | None = None
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
            if not known or set(prompt) - {"prompt", "prompt_token_ids"}:
                raise ValueError(f"prompts[{index}] has keys {sorted(prompt)}; give prompt, prompt_token_ids or both.")
            text = prompt.get("prompt")
            given = prompt[known[-1]]
        if isinstance(given, str):
            return _Ids(self.get_tokenizer().encode_prompt(given), given)
        if not _is_ids(given):
            raise ValueError(
                f"prompts[{index}]={given!r} must be a text, a list of token ids, or a dict with one of them."
            )
        return _Ids([int(token_id) for token_id in given], text)  # pyright: ignore[reportGeneralTypeIssues]

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _request(self, request_id: str, prompt: _Ids, params: SamplingParams) -> Request:
        seed = self.config.sampling.seed
        return Request(request_id, prompt.token_ids, params, prompt=prompt.text, job_seed=seed)

    def _answer_all(
        self,
        prompts: Sequence[_Ids],
        params: Sequence[SamplingParams],
        *,
        progress: bool,
        own_share: bool = False,
    ) -> list[RequestOutput]:
        engine, team = self._open(), self._team
        if team is not None:
            _check_same(team, prompts, params)
        requests = [self._request(self._next_id(), *each) for each in zip(prompts, params, strict=True)]
        if team is not None:
            return self._answer_together(team, engine, requests, own_share=own_share)
        outputs: list[RequestOutput] = []
        with Progress(disable=not progress) as bar, _Owner(self, engine, [each.request_id for each in requests]):
            task = bar.add_task("prompts", total=len(requests))
            with self._lock:
                _add(engine, requests)
            for request in requests:
                outputs.append(self._next_output(engine, request.request_id))
                bar.update(task, advance=1)
        return outputs

    def _answer_together(
        self, team: Team, engine: Engine, requests: Sequence[Request], *, own_share: bool
    ) -> list[RequestOutput]:
        """This rank's share of the requests, in step with the other ranks; then everybody's results."""
        try:
            own = requests[team.rank :: team.size]
            found: dict[str, RequestOutput] = {}
            with self._lock:
                _add(engine, own)
                engine.join()
                while engine.has_unfinished:
                    with kept_until_done():
                        found |= {output.request_id: output for output in engine.step()}
            answers = [found[request.request_id] for request in own]
            if own_share:
                return answers
            shares = team.ranks.everyone.gather_objects(answers)
        except Exception as error:
            raise RuntimeError(f"the ranks stop: {team.abandon(error, lives_on=True)}") from error
        return [shares[index % team.size][index // team.size] for index in range(len(requests))]

    def _stream(self, engine: Engine, request: Request) -> Iterator[RequestOutput]:
        with _Owner(self, engine, [request.request_id]):
            with self._lock:
                _add(engine, [request], stream=True)
            while True:
                output = self._next_output(engine, request.request_id)
                yield output
                if output.finished:
                    return

    def _next_output(self, engine: Engine, request_id: str) -> RequestOutput:
        """The next output of one request: from its box, or by running steps until there is one."""
        while True:
            with self._lock:
                if self._open() is not engine:
                    raise RuntimeError("this LLM is closed; make a new one.")
                box = self._boxes[request_id]
                if box:
                    return box.popleft()
                assert engine.has_unfinished, f"request {request_id} vanished from the engine"
                with kept_until_done():
                    for output in engine.step():
                        if output.request_id in self._boxes:
                            self._boxes[output.request_id].append(output)


class _Owner:
    """Boxes for the outputs of some requests; on the way out, whatever the reason, unfinished ones are aborted."""

    def __init__(self, llm: LLM, engine: Engine, request_ids: Sequence[str]) -> None:
        self._llm, self._engine, self._request_ids = llm, engine, request_ids

    def __enter__(self) -> None:
        with self._llm._lock:
            taken = [each for each in self._request_ids if each in self._llm._boxes]
            if taken:
                raise ValueError(f"request_id={taken[0]!r} is already being answered; ids must be unique.")
            self._llm._boxes.update({request_id: deque() for request_id in self._request_ids})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._llm._lock, kept_until_done():
            for request_id in self._request_ids:
                self._engine.abort(request_id)
                self._llm._boxes.pop(request_id, None)


def _add(engine: Engine, requests: Sequence[Request], *, stream: bool = False) -> None:
    for request in requests:
        with kept_until_done():
            engine.add_request(request, stream=stream)


def _team(config: Config, parts: Parts | None) -> Team | None:
    """The ranks that torchrun started, if it started several; a network that is loaded already is one rank's."""
    environment = rank_environment() if parts is None else None
    return None if environment is None else Team(config, environment)


def _check_config_alone(config: Config, arguments: Config) -> None:
    """Raise ValueError where arguments stand beside config=, or config has keys that nobody would read."""
    if beside := changed_keys(arguments):
        raise ValueError(
            f"config= stands for all arguments, but {', '.join(beside)} came beside it and would be ignored; "
            "set them in config, or leave config out."
        )
    unread = [key for key in changed_keys(config) if key.startswith(JOB_KEYS) and key not in USED_JOB_KEYS]
    if unread:
        raise ValueError(
            f"config= sets {', '.join(unread)}, which LLM would ignore: they are of a job's files and lines; "
            "give SamplingParams with each call."
        )


def _is_ids(value: object) -> bool:
    """A sequence of whole numbers; the empty one counts (and is rejected by the engine, as a prompt without tokens)."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        return False
    return all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _is_one_prompt(prompts: object) -> bool:
    """A text, a dict, or a flat list of ids. An empty list is a list of no prompts."""
    return isinstance(prompts, str | Mapping) or (_is_ids(prompts) and bool(prompts))


def _check_same(team: Team, prompts: Sequence[_Ids], params: Sequence[SamplingParams]) -> None:
    """ValueError on every rank where they were given different things: all are in step then, and may ask again."""
    try:
        own = (len(prompts), digest_of([prompt.token_ids for prompt in prompts], params))
        given = team.ranks.everyone.gather_objects(own)
    except Exception as error:
        raise RuntimeError(f"the ranks stop: {team.abandon(error, lives_on=True)}") from error
    others = [rank for rank, each in enumerate(given) if each != given[0]]
    if others:
        raise ValueError(
            f"ranks {others} were given other prompts or parameters than rank 0 ({given[0][0]} prompts there, "
            f"{given[others[0]][0]} on rank {others[0]}); call with the same on every rank: each answers its share."
        )


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    given: Sequence[object] = params if isinstance(params, Sequence) else [params]
    listed: list[SamplingParams] = []
    for at, each in enumerate(given):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"params[{at}]={each!r} must be SamplingParams.")
        listed.append(each)
    if len(listed) != count:
        raise ValueError(f"params has {len(listed)} entries for {count} prompts; give one for all, or one for each.")
    return listed
