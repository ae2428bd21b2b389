"""The Python API: `LLM(...)` with `generate`, `chat`, `stream`, `abort`, `get_tokenizer` and `close`.

Knows what a call gives and wants back, on one rank or several. prompts.py knows the forms of prompts, shared_engine.py
whose answer is whose; the engine does the rest. Calls from several threads, and streams read in turns, share the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from rich.progress import Progress

from configs.checks import freeze
from configs.schema import CacheConfig, Config, EngineConfig, SamplingConfig, changed_keys
from configs.torchrun import rank_environment
from moe.engine.ambient import own_modes
from moe.engine.engine import Engine
from moe.engine.memory_plan import MemoryPlan
from moe.engine.parts import Parts
from moe.engine.prompts import Prompt, PromptIds, listed_params, listed_prompts, prompt_ids
from moe.engine.request import Request, RequestOutput, SamplingParams, digest_of
from moe.engine.shared_engine import SharedEngine
from moe.engine.stats import EngineStats
from moe.engine.team import Team
from moe.engine.tokenizer import Tokenizer

# Keys of a job and of its lines, which a call of the API says for itself.
JOB_KEYS = ("input", "output", "job.", "sampling.")
USED_JOB_KEYS = ("job.chat_template", "sampling.seed")

Messages = Sequence[Mapping[str, Any]]


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
            with own_modes():
                self._shared = SharedEngine(Engine(self.config, parts=parts, ranks=ranks))
        except Exception as error:
            if self._team is not None:
                self._team.abandon(error, lives_on=True)
            raise
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

        Ctrl-C waits for the step that runs; its requests are gone then, and the LLM can be asked again. A second Ctrl-C
        does not wait; the LLM may be in the middle of something then, and refuses further calls (RuntimeError): close
        it and make a new one. With several ranks the first does so too, for the others have gone on.

        In a script that torchrun starts, every rank calls this with the same prompts, answers its share of them (every
        N-th), and gets all results; with `own_share` those of its share alone.
        """
        ready = [prompt_ids(prompt, index, self._encode) for index, prompt in enumerate(listed_prompts(prompts))]
        return self._answer_all(ready, listed_params(params, len(ready)), progress=progress, own_share=own_share)

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
        if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
            raise ValueError(f"messages={messages!r} must be a conversation (a list of messages), or a list of them.")
        listed = list(messages)
        chats: list[Any] = [listed] if listed and isinstance(listed[0], Mapping) else listed
        tokenizer = self.get_tokenizer()
        ready = [
            PromptIds(
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
        merged = [each.merged(tokenizer.generation_defaults) for each in listed_params(params, len(ready))]
        return self._answer_all(ready, merged, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt piece by piece: after each new token an output with everything so far (cumulative).

        The last one has `finished=True`. Leaving the loop early aborts the request. With `request_id` another thread,
        or the loop's own body, can `abort` it; the last output then has finish_reason "abort".
        """
        self._shared.check_open()  # now, not when it is read
        ready = prompt_ids(prompt, 0, self._encode)
        if self._team is not None:
            raise ValueError(f"stream() answers on one rank, but {self._team.size} share the experts; use generate().")
        request_id = request_id if request_id is not None else self._next_id()
        return self._stream(self._request(request_id, ready, *listed_params(params, 1)))

    def abort(self, request_id: str) -> bool:
        """End a request; its owner gets what it had, with finish_reason "abort". False where no such request runs."""
        return self._shared.abort(request_id)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use; `.hf` is transformers' own object. ValueError where the checkpoint has none."""
        tokenizer = self._shared.engine.tokenizer
        if tokenizer is None:
            raise ValueError(f"model={self.config.model!r} has no tokenizer; give one as tokenizer=, or use token ids.")
        return tokenizer

    @property
    def engine(self) -> Engine:
        """The engine inside, for those who drive it themselves."""
        return self._shared.engine

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._shared.engine.plan

    def stats(self) -> EngineStats:
        """Counters since the start, the experts' load included."""
        with self._shared.lock:
            return self._shared.engine.count_experts()

    def close(self) -> None:
        """Give memory and threads back. Any later call raises RuntimeError; closing twice is fine."""
        engine = self._shared.close()
        if engine is None:
            return
        in_order = self._team is None or not self._team.closed
        if in_order and self._shared.in_order:
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

    def _encode(self, text: str) -> list[int]:
        return self.get_tokenizer().encode_prompt(text)

    def _next_id(self) -> str:
        """Not one that a caller of `stream` has chosen."""
        while self._shared.is_asked(name := f"request-{next(self._numbers)}"):
            pass
        return name

    def _request(self, request_id: str, prompt: PromptIds, params: SamplingParams) -> Request:
        seed = self.config.sampling.seed
        return Request(request_id, prompt.token_ids, params, prompt=prompt.text, job_seed=seed)

    def _answer_all(
        self,
        prompts: Sequence[PromptIds],
        params: Sequence[SamplingParams],
        *,
        progress: bool,
        own_share: bool = False,
    ) -> list[RequestOutput]:
        self._shared.check_in_order()
        team = self._team
        if team is not None:
            _check_same(team, prompts, params)
        requests = [self._request(self._next_id(), *each) for each in zip(prompts, params, strict=True)]
        if team is not None:
            return self._answer_together(team, requests, own_share=own_share)
        outputs: list[RequestOutput] = []
        with Progress(disable=not progress) as bar, self._shared.asked(requests):
            task = bar.add_task("prompts", total=len(requests))
            for request in requests:
                outputs.append(self._shared.next_output(request.request_id))
                bar.update(task, advance=1)
        return outputs

    def _answer_together(self, team: Team, requests: Sequence[Request], *, own_share: bool) -> list[RequestOutput]:
        """This rank's share of the requests, in step with the other ranks; then everybody's results."""
        try:
            answers = self._shared.answer_in_step(requests[team.rank :: team.size])
            if own_share:
                return answers
            shares = team.ranks.everyone.gather_objects(answers)
        except Exception as error:
            raise RuntimeError(f"the ranks stop: {team.abandon(error, lives_on=True)}") from error
        return [shares[index % team.size][index // team.size] for index in range(len(requests))]

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        with self._shared.asked([request], stream=True):
            while True:
                output = self._shared.next_output(request.request_id)
                yield output
                if output.finished:
                    return


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


def _check_same(team: Team, prompts: Sequence[PromptIds], params: Sequence[SamplingParams]) -> None:
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
