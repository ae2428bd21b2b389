"""The loop: requests in, steps, answers out. Puts scheduler, runner, text and memory together.

Knows their order and whom a fault concerns; holds none of their algorithms.

A request's own fault (too long, an id the model lacks, NaN logits, text that cannot be decoded) ends that request with
an error record and nobody else's. A fault of a step's computation ends the engine: StepError names stage and requests.
Not thread-safe: LLM holds a lock around every call.
"""

from __future__ import annotations

import logging
import math
import time

from configs.schema import Config
from kv_cache.layout import KVLayout
from kv_cache.pool import KVPool
from kv_cache.prefix_cache import PrefixCache
from moe.engine.answer import Answer, Sample, rejection
from moe.engine.cuda_graphs import DecodeGraphs
from moe.engine.measure import measure_memory
from moe.engine.memory_plan import MemoryPlan, plan_memory
from moe.engine.parts import Parts, kv_layout, load_parts
from moe.engine.request import Request, RequestOutput, TokenLogprobs
from moe.engine.runner import Runner, Sampled
from moe.engine.sampler import Sampler
from moe.engine.scheduler import Schedule, Scheduler
from moe.engine.sequence import Sequence
from moe.engine.stats import EngineStats
from moe.engine.stop import TextStream
from moe.engine.tokenizer import check_ids, truncate_prompt
from moe.engine.watchdog import Watchdog
from router.load import LoadCounter, balancedness

logger = logging.getLogger(__name__)

IDLE = "between steps"
NAMED_REQUESTS = 8  # a step may hold hundreds; its message stays readable


class StepError(RuntimeError):
    """A step failed as a whole; the engine is of no further use. `stage` and `request_ids` say where."""

    def __init__(self, stage: str, request_ids: list[str], cause: BaseException) -> None:
        self.stage, self.request_ids = stage, request_ids
        shown = ", ".join(request_ids[:NAMED_REQUESTS])
        more = f" and {len(request_ids) - NAMED_REQUESTS} more" if len(request_ids) > NAMED_REQUESTS else ""
        super().__init__(f"stage {stage!r} failed for requests {shown}{more}: {type(cause).__name__}: {cause}")


class Engine:
    """Continuous batching over one network, by a config that was checked. `parts` None loads what it names."""

    def __init__(self, config: Config, *, parts: Parts | None = None) -> None:
        self.config = config
        self.parts = parts = parts or load_parts(config)
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.model.vocab_size
        engine, cache = config.engine, config.cache
        network = parts.network
        if network.load is None:
            network.load = LoadCounter(parts.model.num_layers, parts.model.moe.num_experts, parts.device)
        use_graphs = engine.cuda_graphs and parts.device.type == "cuda"
        layout = kv_layout(parts.model, cache.block_size, parts.dtype, cache.dtype)
        sampler = Sampler(self.vocab_size)
        self.plan = plan_cache(config, parts, layout, sampler)
        logger.info("%s", self.plan.table())
        pool = KVPool(layout, self.plan.num_blocks, parts.device)
        salt = (parts.name, parts.model.family, str(parts.dtype), str(layout.dtype))
        self.cache = PrefixCache(self.plan.num_blocks, cache.block_size, salt=salt, enabled=cache.prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=engine.max_num_seqs,
            max_batched_tokens=engine.max_batched_tokens,
            prefill_chunk=engine.prefill_chunk,
            force_preempt_every=engine.force_preempt_every,
        )
        self.runner = Runner(
            network,
            sampler,
            pool,
            device=parts.device,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_ids=parts.eos_ids,
            decode=parts.decode_one if parts.tokenizer is not None else None,
            graphs=DecodeGraphs(
                network,
                pool.layers,
                parts.device,
                max_num_seqs=self.scheduler.max_num_seqs,
                max_model_len=self.max_model_len,
                block_size=cache.block_size,
            )
            if use_graphs
            else None,
        )
        self.stats = EngineStats(kv_blocks_total=self.plan.num_blocks)
        self.watchdog = Watchdog(engine.step_timeout_s)
        self._answers: dict[str, Answer] = {}
        self._ready: list[RequestOutput] = []
        self._failure: StepError | None = None
        self._stage, self._step_ids = IDLE, []

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work or finished answers to hand out."""
        return bool(self._ready) or self.scheduler.has_unfinished

    @property
    def num_unfinished(self) -> int:
        return len(self._answers)

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        """Queue a request; one that can never run is answered with an error by the next step.

        `stream`: an output after every step that changed the answer, each holding everything so far.
        """
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._answers:
            raise ValueError(f"request_id={request.request_id!r} is already being answered; ids must be unique.")
        prompt_ids = truncate_prompt(request.prompt_token_ids, request.params.truncate_prompt_tokens)
        try:
            max_tokens = self._max_tokens(request, prompt_ids)
        except ValueError as error:
            self._count_end(failed=True)
            self._ready.append(rejection(request, prompt_ids, str(error)))
            return
        answer = Answer(request, prompt_ids, [], streamed=stream)
        for index in range(request.params.n):
            leader = answer.samples[0].sequence if index else None
            table = self.cache.new_table()
            sequence = Sequence(request, index, prompt_ids, max_tokens, table, leader)
            answer.samples.append(Sample(sequence, self._text_stream(request), self.parts.eos_ids))
            self.scheduler.add(sequence)
        self._answers[request.request_id] = answer
        self.stats.prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; the next step hands out what it had. False: not known, or ended."""
        answer = self._answers.get(request_id)
        if answer is None:
            return False
        for sample in answer.samples:
            if sample.finish_reason is None:
                sample.end("abort")
        self._close(answer)
        self._ready.append(answer.output())
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step and return the answers that ended, and those that changed and are streamed."""
        if self._failure is not None:
            raise self._failure
        outputs, self._ready = self._ready, []
        if not self.scheduler.has_unfinished:
            return outputs
        started = time.perf_counter()
        try:
            self._step_ids = list(self._answers)
            self._enter("schedule")
            schedule = self.scheduler.schedule()
            self._count_schedule(schedule)
            self._step_ids = schedule.request_ids
            sampled = self.runner.run(schedule, self._enter)
            self.scheduler.advance(schedule)
            self._enter("detokenize")
            changed = self._accept(sampled)
        except Exception as error:
            self._failure = StepError(self._stage, self._step_ids, error)
            raise self._failure from error
        finally:
            self._leave()
        self.stats.step_seconds += time.perf_counter() - started
        for answer in changed:
            if answer.finished:
                self._close(answer)
            if answer.finished or answer.streamed:
                outputs.append(answer.output())
        return outputs

    def count_experts(self) -> EngineStats:
        """The stats with the experts' load filled in; waits for the device."""
        load = self.parts.network.load
        if load is not None:
            counts_LE = load.snapshot()
            self.stats.expert_counts = counts_LE.tolist()
            self.stats.expert_balance = balancedness(counts_LE) if bool(counts_LE.any()) else None
        return self.stats

    def close(self) -> None:
        """End the watchdog's thread. Closing twice is fine."""
        self.watchdog.close()

    def _max_tokens(self, request: Request, prompt_ids: list[int]) -> int:
        """How many tokens the request may generate; ValueError where it can never run."""
        params, num_prompt = request.params, len(prompt_ids)
        check_ids(prompt_ids, self.vocab_size)
        params.check_vocab(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs text, but this model has no tokenizer; use stop_token_ids."
            )
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but engine.max_model_len={self.max_model_len} must hold the "
                "prompt and at least one new token; shorten the prompt, or set truncate_prompt_tokens."
            )
        # The last token of a sequence is never written to the cache.
        left_in_cache = max(self.plan.capacity_tokens + 1 - num_prompt, 1)
        room = min(self.max_model_len - num_prompt, params.max_tokens or left_in_cache)
        if self.scheduler.never_fits(num_prompt + room):
            raise ValueError(
                f"a prompt of {num_prompt} tokens with {room} new ones needs more than the {self.plan.num_blocks} "
                f"blocks of {self.plan.block_size} tokens that the KV cache has; lower max_tokens, or raise "
                "cache.num_blocks."
            )
        return room

    def _text_stream(self, request: Request) -> TextStream | None:
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return None
        decoder = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return TextStream(
            decoder,
            tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _accept(self, sampled: list[Sampled]) -> list[Answer]:
        """Give each new token to its answer; the answers that changed, in order."""
        changed: dict[str, Answer] = {}
        now = time.monotonic()
        for token in sampled:
            answer = self._answers[token.sequence.request.request_id]
            changed[answer.request.request_id] = answer
            if answer.error is not None:
                continue  # another sample of it failed in this very step
            try:
                self._accept_one(answer, token)
            except Exception as error:
                logger.exception("request %s failed", answer.request.request_id)
                self._fail(answer, f"{type(error).__name__}: {error}")
            if not answer.has_token and answer.error is None:
                answer.has_token = True
                self.stats.ttft_seconds.append(now - answer.request.arrival)
        return list(changed.values())

    def _accept_one(self, answer: Answer, token: Sampled) -> None:
        sample = answer.samples[token.sequence.index]
        if token.token_id < 0:
            position = token.sequence.num_tokens
            error = f"the model's logits for position {position} hold NaN or infinity; no token was drawn."
            self._fail(answer, error, forget=True)
            return
        if not sample.sequence.output_ids and _has_nan(sample.sequence.prompt_logprobs):
            self._fail(answer, "the model's logits for a prompt position hold NaN or infinity.", forget=True)
            return
        sample.accept(token.token_id, token.logprobs)
        self.stats.output_tokens += 1
        if sample.finish_reason is not None:
            self.scheduler.finish(sample.sequence)

    def _fail(self, answer: Answer, error: str, *, forget: bool = False) -> None:
        """One sample's fault ends the whole request; samples that had ended keep their ending.

        `forget`: its cache may hold NaN and is not to be found by others.
        """
        answer.error = error
        for sample in answer.samples:
            if sample.finish_reason is None:
                sample.fail()
            self.scheduler.finish(sample.sequence, forget=forget)

    def _close(self, answer: Answer) -> None:
        """The one way out of the engine, whatever the ending."""
        for sample in answer.samples:
            self.scheduler.finish(sample.sequence)
        del self._answers[answer.request.request_id]
        self.stats.cached_tokens += sum(sample.sequence.num_cached for sample in answer.samples)
        self._count_end(failed=answer.error is not None)

    def _count_end(self, *, failed: bool) -> None:
        self.stats.requests += 1
        self.stats.failed_requests += failed

    def _count_schedule(self, schedule: Schedule) -> None:
        stats = self.stats
        stats.steps += 1
        stats.mixed_steps += bool(schedule.decodes and schedule.chunks)
        stats.chunks += len(schedule.chunks)
        stats.split_prompts += sum(chunk.sequence.prompt_chunks == 1 for chunk in schedule.chunks)
        stats.computed_prompt_tokens += sum(chunk.length for chunk in schedule.chunks)
        replayed = [each for each in schedule.decodes if not each.needs_token(each.num_computed + 1)]
        stats.replayed_tokens += len(replayed)
        stats.preemptions = self.scheduler.num_preemptions
        stats.kv_blocks_used = self.cache.allocator.num_used
        stats.kv_blocks_peak = max(stats.kv_blocks_peak, stats.kv_blocks_used)

    def _enter(self, stage: str) -> None:
        self._stage = stage
        self.watchdog.enter(stage, self._step_ids)

    def _leave(self) -> None:
        self._stage, self._step_ids = IDLE, []
        self.watchdog.leave()


def _has_nan(prompt_logprobs: list[TokenLogprobs | None]) -> bool:
    return any(math.isnan(each.logprob) for entry in prompt_logprobs if entry for each in entry.values())


def plan_cache(config: Config, parts: Parts, layout: KVLayout, sampler: Sampler) -> MemoryPlan:
    """Measure what weights and steps take, and decide how many blocks the cache gets."""
    memory = measure_memory(
        parts.network,
        sampler,
        layout,
        parts.device,
        max_batched_tokens=config.engine.max_batched_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=parts.max_model_len,
        cuda_graphs=config.engine.cuda_graphs,
    )
    return plan_memory(
        layout,
        memory,
        num_blocks=config.cache.num_blocks,
        memory_fraction=config.cache.memory_fraction,
        cpu_gb=config.cache.cpu_gb,
        max_model_len=parts.max_model_len,
    )
