"""One step as two, row for row: the first half of a rank's rows and the rest. Knows a step's tensors and nothing else.

A prompt's chunk may end in the first half and go on in the second: a cut like any other between two chunks, which
changes no bit. Decode rows lie first, so that they come together in the first half where prompts have the most rows.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kernels.checks import cdiv
from moe.model.step_input import DecodeBatch, PrefillBatch, StepInput, StepOfAll
from moe.model.step_plan import Upload, starts_of

Halves = tuple[StepInput, StepInput]


def split_step(step: StepInput) -> Halves:
    """Both halves; either may be without rows. Of `most_rows` each knows its own bound: no rank has more in that half.

    Wanted logits stay with the whole step: nothing of the halves tells them.
    """
    num_tokens, device = step.token_ids_T.shape[0], step.token_ids_T.device
    cut = cdiv(num_tokens, 2)
    of_first = StepOfAll(cdiv(step.most_rows, 2), step.any_prefill)
    of_second = replace(of_first, most_rows=step.most_rows // 2)
    if not num_tokens:
        return StepInput.empty(of_first, device), StepInput.empty(of_second, device)
    num_decode = min(cut, step.num_decode)
    decode = _split_decode(step.decode, num_decode) if step.decode is not None else (None, None)
    prefill = _split_prefill(step.prefill, cut - num_decode) if step.prefill is not None else (None, None)
    return (
        _rows(step, slice(0, cut), num_decode, decode[0], prefill[0], of_first),
        _rows(step, slice(cut, num_tokens), step.num_decode - num_decode, decode[1], prefill[1], of_second),
    )


def _rows(
    step: StepInput,
    rows: slice,
    num_decode: int,
    decode: DecodeBatch | None,
    prefill: PrefillBatch | None,
    of_all: StepOfAll,
) -> StepInput:
    return StepInput(
        token_ids_T=step.token_ids_T[rows],
        positions_T=step.positions_T[rows],
        slot_mapping_T=step.slot_mapping_T[rows],
        num_decode=num_decode,
        decode=decode,
        prefill=prefill,
        logits_rows_B=step.logits_rows_B[:0],
        real_T=None if step.real_T is None else step.real_T[rows],
        of_all=of_all,
    )


def _split_decode(decode: DecodeBatch, cut: int) -> tuple[DecodeBatch | None, DecodeBatch | None]:
    """The bound on the lengths stays: it changes no bit, and a graph has been captured for it."""
    parts = [
        DecodeBatch(decode.block_tables_BM[rows], decode.kv_lens_B[rows], decode.max_kv_len)
        for rows in (slice(0, cut), slice(cut, None))
    ]
    first, second = (part if part.kv_lens_B.shape[0] else None for part in parts)
    return first, second


def _split_prefill(prefill: PrefillBatch, cut: int) -> tuple[PrefillBatch | None, PrefillBatch | None]:
    """The first `cut` prompt rows, and the rest: what is left of a chunk begins where its first part ended."""
    tables_BM = prefill.block_tables_BM
    if cut == 0:
        return None, prefill
    if cut == sum(prefill.query_lens_host):
        return prefill, None
    lens, ends = list(prefill.query_lens_host), list(prefill.kv_lens_host)
    whole = 0  # chunks that lie in the first half from end to end
    while cut >= lens[whole]:
        cut -= lens[whole]
        whole += 1
    cuts = [cut] if cut else []
    first_lens, first_ends = lens[:whole] + cuts, ends[:whole] + [ends[whole] - lens[whole] + rows for rows in cuts]
    second_lens = [lens[whole] - cut, *lens[whole + 1 :]]
    upload = Upload()
    drafts = [_noted(upload, *each) for each in ((first_lens, first_ends), (second_lens, ends[whole:]))]
    flat_X = upload.to(tables_BM.device)
    # A copy begins where kernels are not compiled anew for another alignment, in the midst of a run.
    tables = (tables_BM[: len(first_lens)], tables_BM[whole:].clone())
    first, second = (_batch(of_half, flat_X, *draft) for of_half, draft in zip(tables, drafts, strict=True))
    return first, second


def _noted(upload: Upload, lens: list[int], ends: list[int]) -> tuple[list[int], list[int], tuple[slice, ...]]:
    offsets = [end - length for end, length in zip(ends, lens, strict=True)]
    return lens, ends, (upload.add(starts_of(lens)), upload.add(offsets), upload.add(ends))


def _batch(
    tables_BM: Tensor, flat_X: Tensor, lens: list[int], ends: list[int], places: tuple[slice, ...]
) -> PrefillBatch:
    query_starts_B1, query_offsets_B, kv_lens_B = (flat_X[place] for place in places)
    return PrefillBatch(
        block_tables_BM=tables_BM,
        query_starts_B1=query_starts_B1,
        query_offsets_B=query_offsets_B,
        kv_lens_B=kv_lens_B,
        max_query_len=max(lens),
        max_kv_len=max(ends),
        query_lens_host=tuple(lens),
        kv_lens_host=tuple(ends),
    )
