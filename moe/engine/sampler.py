"""From logits to token ids, on the device: edits, cuts, the draw, log-probabilities. The ids stay there.

Knows sampling parameters and token ids; knows nothing of text, requests' lives or the network. Rows of a batch have
different parameters as a rule. A row's result has the same bits whatever the other rows are: every stage works on the
rows that need it, alone, and sums are taken in fixed-point integers, whose order does not matter.

Stages: logit_bias, min_tokens, penalties (penalties.py); then the cuts, all three as one threshold on the edited logits
x, of which values equal to the threshold are kept:
    top_k   the k-th largest x
    top_p   the last of the k largest x, at temperature T, before which less than top_p of their mass lies
    min_p   max x + T * log(min_p)
then the draw at temperature T (kernels/sample.py). Greedy rows are not cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample import sample_argmax
from moe.engine.logprobs import LogprobTensors, fixed_point_exp, to_records, token_logprobs
from moe.engine.penalties import LogitEdits, PenaltyRow, TokenCounts
from moe.engine.request import SamplingParams, TokenLogprobs
from moe.engine.upload import upload_array

# Stages that need several times the memory of a row's logits take so many rows at a time.
ROWS_AT_A_TIME = 128
# Up to this k the largest logits are selected, beyond it the row is sorted. The values are the same.
SELECT_TOP_K = 1024


@dataclass(frozen=True)
class SampleRow:
    """One sequence whose next token is wanted. `position` is that token's place in the sequence, prompt included.

    `eos_ids` are the ids that end this text (none if EOS is ignored); with params.stop_token_ids they are masked until
    min_tokens are generated. `counts`, if the caller keeps them, spare the walk over all ids at every step.
    `in_flight`: tokens generated beyond `output_ids`, whose ids are not known yet; penalties need them all.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_ids: Collection[int] = ()
    counts: TokenCounts | None = None
    in_flight: int = 0


class CutRows(NamedTuple):
    """Rows that top_k or top_p cut, and the width that holds the largest k of each (None: a row is sorted whole)."""

    rows_C: Tensor  # int64
    top_k_C: Tensor  # int64
    top_p_C: Tensor  # fp64
    temperature_C: Tensor  # fp32
    width: int | None

    def rows(self, start: int, stop: int) -> CutRows:
        return CutRows(*(x_C[start:stop] for x_C in self[:4]), width=self.width)


class SamplingBatch(NamedTuple):
    """Parameters of the rows on the device. Stages that no row needs are absent."""

    temperature_B: Tensor  # fp32, 0: greedy
    seed_B: Tensor  # int64
    position_B: Tensor  # int64
    edits: LogitEdits | None
    cuts: tuple[CutRows, ...]
    min_p_offset_B: Tensor | None  # fp32, T * log(min_p); -inf: off
    logprob_rows: tuple[int, ...]  # rows that want log-probabilities
    logprob_rows_R: Tensor | None
    num_top_R: tuple[int, ...]

    @classmethod
    def build(cls, rows: Sequence[SampleRow], device: torch.device | str) -> SamplingBatch:
        device = torch.device(device)
        temperature = [draw_temperature(row.params) for row in rows]
        min_p = [_min_p_offset(row.params, t) for row, t in zip(rows, temperature)]
        wanted = [(at, row.params.logprobs) for at, row in enumerate(rows) if row.params.logprobs is not None]
        keys = np.array([[as_int64(row.seed) for row in rows], [row.position for row in rows]], dtype=np.int64)
        seed_B, position_B = upload_array(keys.reshape(2, -1), device)
        return cls(
            temperature_B=upload_array(np.array(temperature, dtype=np.float32), device),
            seed_B=seed_B,
            position_B=position_B,
            edits=_build_edits(rows, device),
            cuts=_build_cuts(rows, temperature, device),
            min_p_offset_B=upload_array(np.array(min_p, dtype=np.float32), device)
            if max(min_p, default=-1) > -math.inf
            else None,
            logprob_rows=tuple(at for at, _ in wanted),
            logprob_rows_R=upload_array(np.array([at for at, _ in wanted], dtype=np.int64), device) if wanted else None,
            num_top_R=tuple(num_top for _, num_top in wanted),
        )


class SampleResult(NamedTuple):
    """ids_B int64 on the device; -1: the row held NaN or +inf, or nothing finite."""

    ids_B: Tensor
    logprob_tensors: LogprobTensors | None  # of the rows that asked, in order
    logprob_rows: tuple[int, ...]
    num_top_R: tuple[int, ...]

    def to_host(self) -> SampleResult:
        """Copies on the host, begun and not waited for: whoever reads them waits for the device first."""
        tensors = self.logprob_tensors
        return self._replace(
            ids_B=self.ids_B.to("cpu", non_blocking=True), logprob_tensors=tensors and tensors.to_host()
        )

    @property
    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry a row of the batch, None where the row did not ask; None if none did. Waits for the device."""
        if self.logprob_tensors is None:
            return None
        records: list[TokenLogprobs | None] = [None] * self.ids_B.shape[0]
        for row, record in zip(self.logprob_rows, to_records(self.logprob_tensors, self.num_top_R)):
            records[row] = record
        return records


class Sampler:
    """Samples one token a row. Holds no state: the random stream is a function of seed, position and id."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits_BV: Tensor, batch: SamplingBatch) -> SampleResult:
        """`logits_BV` fp32 is not changed. No wait for the device."""
        size = (batch.temperature_B.shape[0], self.vocab_size)
        assert tuple(logits_BV.shape) == size, f"logits are {tuple(logits_BV.shape)}, wanted {size}"
        assert logits_BV.dtype == torch.float32, f"logits are {logits_BV.dtype}, wanted fp32"
        x_BV = logits_BV
        if batch.edits is not None or batch.cuts or batch.min_p_offset_B is not None:
            x_BV = logits_BV.clone()
            if batch.edits is not None:
                batch.edits.apply_(x_BV)
            _cut_(x_BV, _thresholds(x_BV, batch))
        ids_B = sample_argmax(x_BV, batch.temperature_B, batch.seed_B, batch.position_B)
        if x_BV is not logits_BV:
            # A mask may have covered the only bad value, so the raw row is asked. amax is NaN if any entry is.
            ids_B = torch.where(logits_BV.amax(dim=1).isfinite(), ids_B, -1)
        logprobs = None
        if batch.logprob_rows_R is not None:
            num_top = max(batch.num_top_R)
            parts = [
                token_logprobs(logits_BV[at_R], ids_B[at_R], num_top)
                for at_R in batch.logprob_rows_R.split(ROWS_AT_A_TIME)
            ]
            logprobs = LogprobTensors(*(torch.cat(each) for each in zip(*parts)))
        return SampleResult(ids_B, logprobs, batch.logprob_rows, batch.num_top_R)

    def prompt_tensors(self, logits_TV: Tensor, target_ids: Sequence[int], num_top: int) -> LogprobTensors:
        """Of each prompt token under the logits of the position before it. No wait for the device."""
        assert logits_TV.shape == (len(target_ids), self.vocab_size), f"{tuple(logits_TV.shape)} logits"
        ids_T = upload_array(np.array(target_ids, dtype=np.int64), logits_TV.device)
        return token_logprobs(logits_TV, ids_T, num_top)


def _thresholds(x_BV: Tensor, batch: SamplingBatch) -> Tensor | None:
    """threshold_B: a row keeps its entries at or above it. None: no row is cut."""
    if not batch.cuts and batch.min_p_offset_B is None:
        return None
    threshold_B = torch.full_like(batch.temperature_B, -torch.inf)
    for cut in batch.cuts:
        for at in range(0, cut.rows_C.shape[0], ROWS_AT_A_TIME):
            part = cut.rows(at, at + ROWS_AT_A_TIME)
            threshold_B[part.rows_C] = _cut_threshold(x_BV[part.rows_C], part)
    if batch.min_p_offset_B is not None:
        # The largest entry always passes: the offset is at most 0.
        threshold_B = torch.maximum(threshold_B, x_BV.amax(dim=1) + batch.min_p_offset_B)
    return threshold_B


def _cut_(x_BV: Tensor, threshold_B: Tensor | None) -> None:
    """Entries below their row's threshold become -inf, in place."""
    if threshold_B is None:
        return
    for x_CV, threshold_C in zip(x_BV.split(ROWS_AT_A_TIME), threshold_B.split(ROWS_AT_A_TIME)):
        x_CV.masked_fill_(x_CV < threshold_C.unsqueeze(1), -torch.inf)


def _cut_threshold(x_CV: Tensor, cut: CutRows) -> Tensor:
    """The smallest kept value of each row, from its largest values in order."""
    if cut.width is None:
        sorted_CW = x_CV.sort(dim=1, descending=True).values
    else:
        sorted_CW = x_CV.topk(min(cut.width, x_CV.shape[1]), dim=1, largest=True, sorted=True).values
    top_k_C1 = cut.top_k_C.unsqueeze(1).clamp_max(x_CV.shape[1])
    rank_W = torch.arange(sorted_CW.shape[1], device=x_CV.device)
    scaled_CW = (sorted_CW - sorted_CW[:, :1]) / cut.temperature_C.unsqueeze(1)
    mass_CW = torch.where(rank_W < top_k_C1, fixed_point_exp(scaled_CW), 0)
    before_CW = mass_CW.cumsum(dim=1) - mass_CW
    limit_C1 = cut.top_p_C.unsqueeze(1) * mass_CW.sum(dim=1, keepdim=True).double()
    # Never the empty set: nothing lies before the first. Where top_p is 1 all k are kept, those of no mass too.
    kept_CW = (rank_W < top_k_C1) & ((before_CW.double() < limit_C1) | (cut.top_p_C.unsqueeze(1) >= 1.0))
    last_C1 = (kept_CW.sum(dim=1, keepdim=True) - 1).clamp_min(0)
    return sorted_CW.gather(1, last_C1).squeeze(1)


def _build_edits(rows: Sequence[SampleRow], device: torch.device) -> LogitEdits | None:
    biases: list[tuple[int, int, float]] = []
    masked: list[tuple[int, int]] = []
    penalties: list[PenaltyRow] = []
    for at, row in enumerate(rows):
        params = row.params
        biases += [(at, token_id, bias) for token_id, bias in (params.logit_bias or {}).items()]
        if len(row.output_ids) + row.in_flight < params.min_tokens:
            ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(row.eos_ids))
            masked += [(at, token_id) for token_id in sorted(ending)]
        if not params.penalizes:
            continue
        assert row.in_flight == 0, "a penalty needs the ids of all tokens"
        repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        counts = row.counts or TokenCounts(row.prompt_ids, row.output_ids)
        assert counts.num_output == len(row.output_ids), "token counts are behind the output"
        penalties.append(PenaltyRow(at, counts, repetition, params.presence_penalty, params.frequency_penalty))
    return LogitEdits.build(biases, masked, penalties, device)


def _build_cuts(rows: Sequence[SampleRow], temperature: Sequence[float], device: torch.device) -> tuple[CutRows, ...]:
    """Two groups at most: rows whose largest k are selected, rows that are sorted."""
    selected, sorted_whole = [], []
    for at, (row, t) in enumerate(zip(rows, temperature)):
        top_p = 1.0 if row.params.top_p is None else row.params.top_p
        top_k = row.params.top_k or 0
        if t == 0.0 or (top_k <= 0 and top_p >= 1.0):
            continue
        group = selected if 0 < top_k <= SELECT_TOP_K else sorted_whole
        group.append((at, top_k if top_k > 0 else 2**31, top_p, t))
    cuts = []
    for group in (selected, sorted_whole):
        if group:
            at, top_k, top_p, t = zip(*group)
            cuts.append(
                CutRows(
                    rows_C=upload_array(np.array(at, dtype=np.int64), device),
                    top_k_C=upload_array(np.array(top_k, dtype=np.int64), device),
                    top_p_C=upload_array(np.array(top_p, dtype=np.float64), device),
                    temperature_C=upload_array(np.array(t, dtype=np.float32), device),
                    width=max(top_k) if group is selected else None,
                )
            )
    return tuple(cuts)


def draw_temperature(params: SamplingParams) -> float:
    """0 for greedy rows."""
    if params.greedy:
        return 0.0
    return 1.0 if params.temperature is None else params.temperature


def _min_p_offset(params: SamplingParams, temperature: float) -> float:
    if not params.min_p or temperature == 0.0:
        return -math.inf
    return temperature * math.log(params.min_p)


def as_int64(seed: int) -> int:
    """Seeds up to 2^64 - 1 as the signed number with the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed
