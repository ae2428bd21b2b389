"""From a schedule to a launched step: tensors, the network, the draw. Nothing here waits for the device.

Knows the pool, the network's interface and the sampler; knows nothing of queues, text or endings. Ids stay on the
device for the next step, and a copy of them (and of log-probabilities, where asked) is on its way to the host when
`launch` returns.

Rows whose token is drawn from the raw logits, and of which nothing else is asked, are drawn inside the CUDA graph,
where there is one. A step with any other row is sampled behind it, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.decode_inputs import Places
from kernels.sample import sample_argmax
from kv_cache.pool import KVPool
from moe.engine.agreement import Agreement
from moe.engine.ambient import own_modes
from moe.engine.cuda_graphs import DecodeGraphs
from moe.engine.in_flight import InFlight, PromptRows
from moe.engine.network import Network
from moe.engine.places import fill_places
from moe.engine.request import TokenLogprobs
from moe.engine.sampler import Sampler, SampleResult, SampleRow, SamplingBatch
from moe.engine.scheduler import Schedule
from moe.engine.sequence import Sequence
from moe.engine.step_tensors import Limits, check_decodes, decode_rows, logits_rows, num_prompt_rows, step_tensors
from moe.engine.upload import upload
from moe.model.step_input import StepInput


class Runner:
    """Launches schedules on one device. `decode` gives the text of one token, for log-probabilities; None: no texts.

    With `graphs`, steps of decode rows alone are replayed. All others are launched one kernel after another.
    """

    def __init__(
        self,
        network: Network,
        sampler: Sampler,
        pool: KVPool,
        places: Places,
        *,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        decode: Callable[[int], str] | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.network = network
        self.graphs = graphs
        self.sampler = sampler
        self.pool = pool
        self.places = places
        self.device = places.newest_P.device
        self.limits = Limits(pool.layout.block_size, pool.num_blocks, max_model_len, sampler.vocab_size)
        self.eos_ids = eos_ids
        self.decode = decode
        self._last_sampled: list[Sequence] = []
        self._last_batch: SamplingBatch | None = None

    @torch.inference_mode()
    def launch(self, schedule: Schedule, agreed: Agreement, enter: Callable[[str], None]) -> InFlight:
        """Start one step; `enter` is told each stage that begins."""
        if torch.is_autocast_enabled(self.device.type):
            with own_modes():
                return self.launch(schedule, agreed, enter)
        enter("prepare")
        if not schedule.num_tokens:
            self._join(agreed, enter)
            return self._in_flight(schedule, None, [])
        if schedule.admitted:
            fill_places(self.places, schedule.admitted)
        if agreed.wants_logits:
            return self._launch_sampler(schedule, agreed, enter)
        self._last_batch = None
        if self.graphs is not None and self._replays(self.graphs, schedule, agreed):
            rows_4B = self._decode_rows(schedule)
            enter("forward")
            ids_B = self.graphs.draw(rows_4B, agreed.most_rows, agreed.max_kv_len)
            drawn = SampleResult(ids_B, None, (), ())
            rows = schedule.sampled_decodes if len(schedule.sampled) < len(schedule.decodes) else None
            return self._in_flight(schedule, drawn if schedule.sampled else None, [], rows)
        tensors = step_tensors(schedule, self.places, self.limits)
        enter("forward")
        logits_BV = self._forward(tensors.step, agreed)
        enter("sample")
        prompts = self._prompt_rows(schedule, logits_BV[len(schedule.sampled) :])
        if not schedule.sampled:
            return self._in_flight(schedule, None, prompts)
        place_S = tensors.sampled_places_S
        draw = (self.places.temperature_P[place_S], self.places.seed_P[place_S], tensors.draw_positions_S)
        ids_B = sample_argmax(logits_BV[: len(schedule.sampled)], *draw)
        self.places.newest_P.index_copy_(0, place_S, ids_B)
        return self._in_flight(schedule, SampleResult(ids_B, None, (), ()), prompts)

    @staticmethod
    def _replays(graphs: DecodeGraphs, schedule: Schedule, agreed: Agreement) -> bool:
        return not agreed.has_prefill and graphs.serves(max(len(schedule.decodes), agreed.most_rows))

    @staticmethod
    def wants_logits(schedule: Schedule) -> bool:
        """Whether any row needs more than a token drawn from its raw logits."""
        return any(each.plain_from and each.num_drawn < each.plain_from for each in schedule.sampled)

    def _join(self, agreed: Agreement, enter: Callable[[str], None]) -> None:
        """A step in which only other ranks have rows: the experts here work for them."""
        enter("forward")
        if self.graphs is None or agreed.has_prefill:
            assert agreed.of_all is not None, "an empty step was launched, and there is no other rank"
            self.network.forward(StepInput.empty(agreed.of_all, self.device), self.pool.caches)
            return
        replay = self.graphs.logits if agreed.wants_logits else self.graphs.draw
        replay(np.zeros((4, 0), np.int64), agreed.most_rows, agreed.max_kv_len)

    def _forward(self, step: StepInput, agreed: Agreement) -> Tensor:
        step = step if agreed.of_all is None else replace(step, of_all=agreed.of_all)
        return self.network.forward(step, self.pool.caches)

    def prompt_records(self, rows: PromptRows) -> list[TokenLogprobs | None]:
        """With the texts of their tokens; to be asked when the step has arrived."""
        return [self.with_texts(each) for each in rows.records]

    def with_texts(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        if logprobs is None or self.decode is None:
            return logprobs
        decode = self.decode
        return {token_id: replace(each, decoded_token=decode(token_id)) for token_id, each in logprobs.items()}

    def _decode_rows(self, schedule: Schedule) -> np.ndarray:
        rows_4B = decode_rows(schedule.decodes, self.limits.block_size)
        check_decodes(rows_4B, schedule.decodes, self.limits)
        return rows_4B

    def _launch_sampler(self, schedule: Schedule, agreed: Agreement, enter: Callable[[str], None]) -> InFlight:
        """A step with a row of which more is asked: logits, then every stage of the sampler that any row needs."""
        if self.graphs is not None and self._replays(self.graphs, schedule, agreed):
            rows_4B = self._decode_rows(schedule)
            wanted = np.array(logits_rows(schedule), np.int64)
            enter("forward")
            logits_BV = self.graphs.logits(rows_4B, agreed.most_rows, agreed.max_kv_len)
            wanted_B, place_S = upload([wanted, rows_4B[1, wanted]], self.device)
            if len(wanted) < len(schedule.decodes):
                logits_BV = logits_BV[wanted_B]
        else:
            tensors = step_tensors(schedule, self.places, self.limits)
            place_S = tensors.sampled_places_S
            enter("forward")
            logits_BV = self._forward(tensors.step, agreed)
        enter("sample")
        prompts = self._prompt_rows(schedule, logits_BV[len(schedule.sampled) :])
        batch = self._sampling_batch(schedule.sampled)
        result = self.sampler.sample(logits_BV[: len(schedule.sampled)], batch)
        self.places.newest_P.index_copy_(0, place_S, result.ids_B)
        self._last_sampled, self._last_batch = schedule.sampled, batch
        holds_back = any(sequence.request.params.penalizes for sequence in schedule.sampled)
        return self._in_flight(schedule, result, prompts, holds_back=holds_back)

    def _in_flight(
        self,
        schedule: Schedule,
        result: SampleResult | None,
        prompts: list[PromptRows],
        rows: list[int] | None = None,
        *,
        holds_back: bool = False,
    ) -> InFlight:
        """Begin the copies to the host and mark their end."""
        result = result and result.to_host()
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return InFlight(schedule, result, rows, prompts, holds_back, arrived)

    def _prompt_rows(self, schedule: Schedule, logits_XV: Tensor) -> list[PromptRows]:
        """Row p of the prompt scores token p + 1; the first token has no score."""
        found: list[PromptRows] = []
        row = 0
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            if not sequence.wants_prompt_rows:
                continue
            num_rows = num_prompt_rows(chunk)
            top = sequence.request.params.prompt_logprobs
            assert top is not None, "prompt rows without a request for them"
            tensors = None
            if num_rows:
                targets = sequence.prompt_ids[chunk.start + 1 : chunk.start + 1 + num_rows]
                tensors = self.sampler.prompt_tensors(logits_XV[row : row + num_rows], targets, top).to_host()
            found.append(PromptRows(chunk, top, tensors))
            row += num_rows
        assert row == logits_XV.shape[0], "logits of prompt rows were computed that nobody wanted"
        return found

    def _sampling_batch(self, sampled: list[Sequence]) -> SamplingBatch:
        """The parameters of these rows. Where the last step sampled the same sequences, all but their positions stand
        (edits of logits follow the output and are made anew)."""
        last, self._last_batch = self._last_batch, None
        if last is not None and sampled == self._last_sampled and last.edits is None:
            return last._replace(position_B=last.position_B + 1)
        return SamplingBatch.build([self._sample_row(sequence) for sequence in sampled], self.device)

    def _sample_row(self, sequence: Sequence) -> SampleRow:
        return SampleRow(
            params=sequence.request.params,
            seed=sequence.seed,
            position=sequence.num_prompt + sequence.num_drawn,
            prompt_ids=sequence.prompt_ids,
            output_ids=sequence.output_ids,
            eos_ids=self.eos_ids,
            counts=sequence.token_counts(),
            in_flight=sequence.in_flight,
        )
