"""The loop: requests in, steps, answers out. Puts scheduler, runner, text and memory together.

Knows their order and whom a fault concerns; holds none of their algorithms.

The device never waits for the host: a step is scheduled and launched while the one before it runs, and only then are
the ids of the one before read, its texts made and its endings found.

    device   |   step n   |  step n + 1  |  step n + 2
    host       launch n+1, accept n   launch n+2, accept n+1

With several ranks every launch is one on all of them (see agreement.py): after `join`, `step` is called on every rank
until `has_unfinished` is false, also where no request is.

One rule holds a step back until the last one is accepted: a row that penalizes tokens needs their ids on the host.

A request's own fault (too long, an id the model lacks, NaN logits, text that cannot be decoded) ends that request with
an error record and nobody else's. A fault of a step's computation ends the engine: StepError names stage and requests.
Not thread-safe, and not to be interrupted: LLM holds a lock, and Ctrl-C back, around every call.
"""

from __future__ import annotations

import logging
import time
import weakref

from configs.schema import Config
from expert_parallel.group import Ranks
from kv_cache.prefix_cache import PrefixCache
from moe.engine.agreement import Alone, InStep, Together
from moe.engine.answers import Answers
from moe.engine.balance import Balance, make_mover
from moe.engine.cuda_graphs import DecodeGraphs
from moe.engine.in_flight import InFlight
from moe.engine.intake import Intake
from moe.engine.measure import make_pool, plan_cache
from moe.engine.parts import Parts, load_parts
from moe.engine.places import make_places
from moe.engine.request import Request, RequestOutput
from moe.engine.resolve import kv_layout
from moe.engine.runner import Runner
from moe.engine.sampler import Sampler
from moe.engine.scheduler import Schedule, Scheduler
from moe.engine.stats import EngineStats
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
    """Continuous batching over one network, by a config that was checked. `parts` None loads what it names; `ranks` are
    then those that share the experts. `expects_more`: this rank may get requests yet, so no rank is done.
    `stop_wanted`: why this rank wants no further step; `stopped`: what all agreed on (0: they go on).
    """

    def __init__(self, config: Config, *, parts: Parts | None = None, ranks: Ranks | None = None) -> None:
        self.config = config
        self.parts = parts = parts or load_parts(config, ranks)
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.model.vocab_size
        engine, cache = config.engine, config.cache
        network = parts.network
        if network.load is None:
            network.load = LoadCounter(
                parts.model.num_layers, parts.model.moe.num_experts, parts.device, parts.experts_of_slots
            )
        use_graphs = engine.cuda_graphs and parts.device.type == "cuda" and parts.graph_safe
        layout = kv_layout(parts.model, cache.block_size, parts.dtype, cache.dtype, parts.device, parts.cache_scales)
        sampler = Sampler(self.vocab_size)
        places = make_places(parts.max_num_seqs(engine), -(-self.max_model_len // cache.block_size), parts.device)
        mover = make_mover(config.balance, network, parts.ranks)
        moving_bytes = 0 if mover is None else mover.num_bytes
        # With experts in host memory steps of a few rows are captured, which takes next to nothing.
        planned = use_graphs and parts.offload is None
        self.plan = plan_cache(config, parts, layout, sampler, cuda_graphs=planned, moving_bytes=moving_bytes)
        if parts.offload is not None:
            parts.offload.reset()  # steps that measured are no part of the run
        logger.info("%s", self.plan.table())
        pool = make_pool(layout, self.plan, parts.device)
        salt = (parts.name, parts.model.family, str(parts.dtype), *layout.salt)
        self.cache = PrefixCache(self.plan.num_blocks, cache.block_size, salt=salt, enabled=cache.prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=parts.max_num_seqs(engine),
            max_batched_tokens=engine.max_batched_tokens,
            prefill_chunk=engine.prefill_chunk,
            force_preempt_every=engine.force_preempt_every,
        )
        self.graphs = None
        if use_graphs:
            self.graphs = DecodeGraphs(
                network,
                pool.caches,
                places,
                max_model_len=self.max_model_len,
                block_size=cache.block_size,
                vocab_size=self.vocab_size,
                offload=parts.offload,
                top_k=parts.model.moe.rule.top_k,
            )
        self.runner = Runner(
            network,
            sampler,
            pool,
            places,
            max_model_len=self.max_model_len,
            eos_ids=parts.eos_ids,
            decode=parts.decode_one if parts.tokenizer is not None else None,
            graphs=self.graphs,
        )
        self.balance = Balance(config.balance, network, parts.model, network.load, parts.ranks, mover)
        self.stats = EngineStats(kv_blocks_total=self.plan.num_blocks)
        self.watchdog = Watchdog(engine.step_timeout_s)
        weakref.finalize(self, self.watchdog.end)  # who drops an engine that was not closed leaves no thread behind
        several = parts.ranks is not None and parts.ranks.everyone.size > 1
        self.in_step: InStep = Together(parts.ranks.everyone) if parts.ranks is not None and several else Alone()
        self.expects_more = False
        self.stop_wanted = self.stopped = 0
        self.joined = False
        self.intake = Intake(parts, self.plan, self.cache)
        self._answers = Answers(self.intake, self.scheduler, self.runner, self.stats)
        self._failure: StepError | None = None
        self._in_flight: InFlight | None = None
        self._stage, self._step_ids = IDLE, []

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work or finished answers to hand out."""
        return self._answers.any_ready or self.scheduler.has_unfinished or self.joined

    @property
    def num_unfinished(self) -> int:
        return len(self._answers)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted yet."""
        return len(self.scheduler.waiting)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that may run at a time."""
        return self.scheduler.max_num_seqs

    def join(self) -> None:
        """Take part in steps with the other ranks, with requests or without, until none of them has work left."""
        self.joined = isinstance(self.in_step, Together)

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        """Queue a request; one that can never run is answered with an error by the next step.

        `stream`: an output after every step that changed the answer, each holding everything so far.
        """
        if self._failure is not None:
            raise self._failure
        self._answers.add(request, stream=stream)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; the next step hands out what it had. False: not known, or ended."""
        return self._answers.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Take one step further and return the answers that ended, and those that changed and are streamed.

        When it returns, the step after the one whose results it returns is on its way.
        """
        if self._failure is not None:
            raise self._failure
        outputs = self._answers.take_ready()
        if not self.scheduler.has_unfinished and not self.joined:
            return outputs
        started = time.perf_counter()
        try:
            accepted, self._in_flight = self._launch_ahead()
            if accepted is not None:
                outputs += self._accept(accepted)
        except StepError as error:
            self._failure = error
            raise
        finally:
            self._leave()
        self.stats.step_seconds += time.perf_counter() - started
        return outputs

    def count_experts(self) -> EngineStats:
        """The stats with the experts' load filled in; waits for the device."""
        load = self.parts.network.load
        if load is not None:
            counts_LE = load.snapshot()
            self.stats.expert_counts = counts_LE.tolist()
            self.stats.expert_balance = balancedness(counts_LE) if bool(counts_LE.any()) else None
        self.stats.saturated_entries = self.runner.pool.count_saturated()
        balance = self.balance
        self.stats.rebalances, self.stats.balance_seconds = balance.num_rebalances, balance.seconds
        self.stats.experts_moved = balance.experts_moved
        self.stats.offload = None if self.parts.offload is None else self.parts.offload.statistics()
        return self.stats

    def conclude(self) -> None:
        """After the last step, on every rank: the files of `balance.*` that were asked for. Then the ranks may part."""
        if self._failure is None:
            self.balance.conclude()
            if self.graphs is not None:
                self.graphs.close()
            self.parts.close_ranks()

    def close(self) -> None:
        """End the watchdog's thread. Closing twice is fine."""
        self.watchdog.close()

    def _launch_ahead(self) -> tuple[InFlight | None, InFlight | None]:
        """The step to accept now, and the one launched behind it (None: that one waits for the first)."""
        first = self._in_flight
        if first is not None and not first.wanted:
            self._wait(first)  # all its requests have ended meanwhile
            first = None
        if first is None:
            first = self._in_flight = self._launch()
        following = None
        if first is not None and self.config.engine.overlap and not first.holds_back:
            try:
                following = self._launch()
            except StepError as error:
                self._failure = error  # raised by the next call: what came before it is answered first
        return first, following

    def _launch(self) -> InFlight | None:
        """Schedule a step and start it. None: nothing can be done here before tokens in flight are known, or at all."""
        try:
            self._enter("schedule", self._answers.request_ids)
            schedule = self.scheduler.schedule(more_to_come=self.expects_more)
            self._enter("agree")
            agreed = self.in_step.agree(
                schedule,
                unfinished=self.scheduler.has_unfinished or self.expects_more,
                wants_logits=self.runner.wants_logits(schedule),
                num_seqs=self.scheduler.num_unfinished,
                stop=self.stop_wanted,
            )
            self.stopped = agreed.stop
            self.joined = self.joined and agreed.unfinished and not agreed.stop
            if agreed.stop or not agreed.most_rows:
                return None
            self._enter("balance")
            self.balance.before_step()
            if self.graphs is not None and agreed.num_seqs > self.graphs.num_prepared:
                # Before the first step, and when there is more to do than ever: graphs for all that may run at a time.
                self._enter("capture")
                self.graphs.prepare(agreed.num_seqs, self.config.engine.capture_seconds, self.in_step.anyone)
            self._step_ids = schedule.request_ids
            launched = self.runner.launch(schedule, agreed, self._enter)
            if not schedule.num_tokens:
                return None
            self.scheduler.advance(schedule)
            return launched
        except Exception as error:
            raise self._failed(error) from error

    def _wait(self, step: InFlight) -> None:
        try:
            self._enter("wait", step.schedule.request_ids)
            step.wait()
            self.parts.check_ranks()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StepError:
        return StepError(self._stage, self._step_ids, error)

    def _accept(self, step: InFlight) -> list[RequestOutput]:
        """Wait for a step, have its tokens given to their answers, and return what is to be handed out."""
        self._wait(step)
        try:
            self._enter("detokenize")
            self._count_step(step.schedule)
            return self._answers.accept(step)
        except Exception as error:
            raise self._failed(error) from error

    def _count_step(self, schedule: Schedule) -> None:
        """Steps count when they are accepted. One whose requests have all ended meanwhile never is."""
        stats = self.stats
        stats.steps += 1
        stats.mixed_steps += bool(schedule.decodes and schedule.chunks)
        stats.chunks += len(schedule.chunks)
        stats.split_prompts += schedule.num_second_chunks
        stats.computed_prompt_tokens += sum(chunk.length for chunk in schedule.chunks)
        stats.replayed_tokens += len(schedule.decodes) - len(schedule.sampled_decodes)
        stats.preemptions = self.scheduler.num_preemptions
        stats.kv_blocks_used = self.cache.allocator.num_used
        stats.kv_blocks_peak = max(stats.kv_blocks_peak, stats.kv_blocks_used)
        stats.num_running, stats.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)

    def _enter(self, stage: str, request_ids: list[str] | None = None) -> None:
        self._stage = stage
        if request_ids is not None:
            self._step_ids = request_ids
        self.watchdog.enter(stage, self._step_ids)

    def _leave(self) -> None:
        self._stage, self._step_ids = IDLE, []
        self.watchdog.leave()
