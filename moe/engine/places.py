"""What the device keeps of each running sequence from step to step: made once, filled when a sequence begins to run.

Knows sequences and arrays; knows nothing of steps. Writes are in stream order: a step that runs still reads what it was
launched with, and a place that changes hands is filled for the steps behind.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from kernels.decode_inputs import Places
from moe.engine.sampler import as_int64, draw_temperature
from moe.engine.sequence import Sequence
from moe.engine.upload import upload


def make_places(max_num_seqs: int, table_width: int, device: torch.device) -> Places:
    """One place for each sequence that may run, and one more, the last, for padding rows."""
    count = max_num_seqs + 1
    return Places(
        tables_PM=torch.zeros((count, table_width), dtype=torch.int32, device=device),
        newest_P=torch.zeros(count, dtype=torch.int64, device=device),
        temperature_P=torch.zeros(count, dtype=torch.float32, device=device),
        seed_P=torch.zeros(count, dtype=torch.int64, device=device),
    )


def fill_places(places: Places, sequences: Rows[Sequence]) -> None:
    """Tables and sampling parameters of sequences that begin to run. Later blocks come with their rows."""
    longest = max(len(sequence.table) for sequence in sequences)
    tables = np.zeros((len(sequences), longest), np.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : len(sequence.table)] = np.frombuffer(sequence.table.ids, np.int32)
    arrays = [
        tables,
        np.array([sequence.place for sequence in sequences], np.int64),
        np.array([draw_temperature(sequence.request.params) for sequence in sequences], np.float32),
        np.array([as_int64(sequence.seed) for sequence in sequences], np.int64),
    ]
    tables_BM, place_B, temperature_B, seed_B = upload(arrays, places.newest_P.device)
    places.tables_PM[:, :longest].index_copy_(0, place_B, tables_BM)
    places.temperature_P.index_copy_(0, place_B, temperature_B)
    places.seed_P.index_copy_(0, place_B, seed_B)
