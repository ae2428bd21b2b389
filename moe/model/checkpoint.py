"""A checkpoint on disk against a network's parameters: all checked before anything is allocated, then loaded once.

Knows weight tables, names on disk and our parameters; knows nothing of the network's code. `open` reads headers only:
every parameter has its tensor, every tensor its parameter, shapes and dtypes fit, or a ValueError lists what does not.
`load_into` reads what a rank needs, straight into the tensors it is given, and counts that each row is written once.
Weights in fp8 become numbers again, except those of routed experts where the config holds these in fp8: then stored
blocks are taken as they are, and other weights are quantised, one expert's matrix at a time.

Choices. The index decides which file supplies a tensor (`weight_files.py`). Tied heads: the embedding is the head; a
different `lm_head.weight` beside it is ignored with a warning. No parameters: calibrated scales of an fp8 KV cache,
which `cache_scales.py` reads, or says that it does not. Unused by rule: `rotary_emb.inv_freq`, and the
multi-token-prediction layers that the config declares, which sit behind the last layer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kernels.quantize import FP8, GROUP
from moe.model.config import ModelConfig
from moe.model.families.registry import weight_table
from moe.model.families.weight_rule import WeightRule
from moe.model.fill_count import FillCount
from moe.model.fp8_blocks import dequantize, expert_blocks, scale_values
from moe.model.header_faults import FP8_DTYPE, name_faults, tensor_faults
from moe.model.parameter_shapes import is_expert_parameter, parameter_shapes, scale_name
from moe.model.slot_experts import Places, SlotExperts
from moe.model.weight_files import WeightFiles, listed

logger = logging.getLogger(__name__)

_MAX_READERS = 8  # files read side by side

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes this rank reads in all), from one thread at a time."""


@dataclass(frozen=True)
class LoadReport:
    """What loading took: bytes read by this rank, seconds, and the files and copies that were ignored."""

    num_bytes: int
    seconds: float
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers fit `config`. Nothing is read but headers until `load_into`."""

    config: ModelConfig
    files: WeightFiles
    rules: tuple[WeightRule, ...]

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> Checkpoint:
        """Checks folder, files, index, names, shapes and dtypes; ValueError says what does not fit."""
        files = WeightFiles.open(folder)
        stacked = weight_table(config, "stacked")
        is_stacked = any(rule.stacked and rule.source in files.tensors for rule in stacked)
        rules = stacked if is_stacked else weight_table(config, "per_expert")
        faults = name_faults(config, files, rules) + tensor_faults(config, files, rules)
        if faults:
            raise ValueError("\n  ".join([f"{folder}: the weights do not fit config.json ({config.family}):", *faults]))
        return cls(config, files, rules)

    @property
    def stores_fp8_experts(self) -> bool:
        """Whether every routed expert is stored in fp8, in the very blocks that `ModelConfig.fp8_experts` means."""
        rules = [rule for rule in self.rules if is_expert_parameter(rule.target)]
        whole = self.config.fp8_block == (GROUP, GROUP)
        aligned = not any(rule.stacked for rule in rules) or self.config.moe.expert_dim % GROUP == 0
        return whole and aligned and all(self.files.tensors[rule.source].entry.dtype == FP8_DTYPE for rule in rules)

    def load_into(
        self,
        targets: Mapping[str, Tensor],
        experts: SlotExperts | None,
        progress: Progress | None = None,
        device: torch.device | None = None,
    ) -> LoadReport:
        """Fills every target once. `experts[s]` is the logical expert of slot s; None: an empty slot, left alone.
        `experts` None: there are no targets for experts, which stay in the files. fp8 weights are computed on `device`;
        left out, on their target's.

        Targets have the names and shapes of `parameter_shapes` for so many slots, on any device, in the dtypes that it
        fixes and else in any floating one. Files are read side by side. Logged: bfloat16 weights in float16, a tied
        head that differs.
        """
        begin = time.perf_counter()
        places = Places(experts or ())
        self._check_targets(targets, places.num_slots, with_experts=experts is not None)
        self._warn_of_float16(targets)
        count = FillCount(targets, places.filled)
        by_file: dict[Path, list[WeightRule]] = {}
        for rule in self.rules:
            if experts is None and is_expert_parameter(rule.target):
                continue
            if rule.expert is None or rule.expert in places.slots_of(rule.target):
                by_file.setdefault(self.files.tensors[rule.source].file, []).append(rule)
        meter = _Meter(self._bytes_to_read(by_file, places), progress)
        stop = threading.Event()  # set by the first fault: it is told at once, not after the other files are read

        def load_file(file: Path) -> None:
            try:
                with Readers(self.files) as readers:
                    for rule in sorted(by_file[file], key=lambda rule: self.files.tensors[rule.source].entry.begin):
                        if stop.is_set():
                            return
                        meter.add(self.load_rule(rule, readers, targets, places, count, device))
            except BaseException as error:
                stop.set()
                if isinstance(error, Exception) and not isinstance(error, ValueError):  # which names its file itself
                    raise RuntimeError(f"{file}: {type(error).__name__}: {error}") from error
                raise

        with ThreadPoolExecutor(max_workers=min(_MAX_READERS, len(by_file))) as pool:
            tasks = [pool.submit(load_file, file) for file in sorted(by_file)]
            try:
                for task in tasks:
                    task.result()
            finally:
                stop.set()  # an interrupt of this thread ends the readers too
        count.check()
        self._warn_of_other_head()
        return LoadReport(meter.done, time.perf_counter() - begin, self.files.ignored)

    def load_rule(
        self,
        rule: WeightRule,
        readers: Readers,
        targets: Mapping[str, Tensor],
        places: Places,
        count: FillCount,
        device: torch.device | None,
    ) -> int:
        """Reads one tensor, or of a stacked one this rank's experts, into its rows; returns the bytes read."""
        target = targets[rule.target]
        device = device or target.device
        if rule.stacked:
            parts: list[tuple[int | None, list[int] | None]] = [*sorted(places.slots_of(rule.target).items())]
        else:
            parts = [(None, None if rule.expert is None else places.slots_of(rule.target)[rule.expert])]
        num_bytes = 0
        for index, slots in parts:
            value, scale, read_bytes = self._read(rule, readers, index, device)
            num_bytes += read_bytes
            if target.dtype == FP8:
                assert slots is not None, f"{rule.target} is held in fp8, which only the experts' bundles are"
                self._fill_blocks(rule, value.to(device), scale, targets, slots, count)
                continue
            if scale is not None:
                assert self.config.fp8_block is not None, "open lets fp8 in only where the config declares blocks"
                value = dequantize(value.to(device), scale, self.config.fp8_block)
            for slot in [None] if slots is None else slots:
                rows = (target if slot is None else target[slot])[rule.row : rule.row + rule.rows]
                rows.copy_(value)
                if rows.dtype == torch.float16 and not rows.isfinite().all():
                    raise ValueError(
                        f"tensor {rule.source} holds values beyond float16's 65504; load it with dtype=bfloat16."
                    )
                count.add(rule.target, slot, rule.row, rule.row + rule.rows)
        return num_bytes

    def _fill_blocks(
        self,
        rule: WeightRule,
        value: Tensor,
        scale: Tensor | None,
        targets: Mapping[str, Tensor],
        slots: list[int],
        count: FillCount,
    ) -> None:
        """An expert's matrix, or part of it, into its rows of the fp8 values and its part of the scales."""
        target, scales = targets[rule.target], targets[scale_name(rule.target)]
        part_rows = target.shape[1] // scales.shape[1]  # gate and up are two parts of w13, w2 is one
        first, parts = rule.row // part_rows, rule.rows // part_rows
        try:
            blocks = expert_blocks(value, scale, self.config.fp8_block, parts)
        except ValueError as error:
            raise ValueError(f"tensor {rule.source}: {error}") from None
        for slot in slots:
            target[slot][rule.row : rule.row + rule.rows].copy_(blocks.values)
            scales[slot][first : first + parts].copy_(blocks.scales)
            count.add(rule.target, slot, rule.row, rule.row + rule.rows)
            count.add(scale_name(rule.target), slot, first, first + parts)

    def _read(
        self, rule: WeightRule, readers: Readers, index: int | None, device: torch.device
    ) -> tuple[Tensor, Tensor | None, int]:
        """(the tensor or its `index`-th expert, its scales on the device if it is fp8, bytes read)."""
        value = readers.read(rule.source, index)
        num_bytes = value.numel() * value.element_size()
        if self.files.tensors[rule.source].entry.dtype != FP8_DTYPE:
            return value, None, num_bytes
        stored_scale = readers.read(rule.scale_source, index)
        scale = scale_values(stored_scale, rule.scale_source).to(device)
        return value, scale, num_bytes + stored_scale.numel() * stored_scale.element_size()

    def _bytes_to_read(self, by_file: Mapping[Path, list[WeightRule]], places: Places) -> int:
        total = 0
        for rule in (rule for rules in by_file.values() for rule in rules):
            names = [rule.source] + [rule.scale_source] * (self.files.tensors[rule.source].entry.dtype == FP8_DTYPE)
            num_bytes = sum(self.files.tensors[name].entry.num_bytes for name in names)
            num_parts = len(places.slots_of(rule.target)) if rule.stacked else rule.shape[0]
            total += num_bytes // rule.shape[0] * num_parts
        return total

    def _check_targets(self, targets: Mapping[str, Tensor], num_slots: int, *, with_experts: bool) -> None:
        shapes = parameter_shapes(self.config, num_slots)
        expected = {n: spec.shape for n, spec in shapes.items() if with_experts or not is_expert_parameter(n)}
        given = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
        assert not wrong, f"targets do not have the names and shapes of parameter_shapes: {listed(wrong)}"

    def _warn_of_float16(self, targets: Mapping[str, Tensor]) -> None:
        stored = {self.files.tensors[rule.source].entry.dtype for rule in self.rules}
        if any(tensor.dtype == torch.float16 for tensor in targets.values()) and stored & {"BF16", FP8_DTYPE}:
            logger.warning(
                "dtype=float16, but %s stores %s: activations of a model trained in bfloat16 can pass float16's 65504 "
                "and become inf; use dtype=bfloat16.",
                self.files.folder,
                " and ".join(sorted(stored)),
            )

    def _warn_of_other_head(self) -> None:
        if not self.config.tie_embeddings or "lm_head.weight" not in self.files.tensors:
            return
        with Readers(self.files) as readers:
            same = torch.equal(readers.read("lm_head.weight"), readers.read("model.embed_tokens.weight"))
        if not same:
            logger.warning(
                "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding; the embedding is used "
                "as the head. If the stored head is meant, set tie_word_embeddings to false in config.json.",
                self.files.folder,
            )


class Readers:
    """The safetensors files that one thread has open; scales may sit in another file than their weight."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The whole tensor, or only entry `index` of its first dimension."""
        file = self._files.tensors[name].file
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        handle = self._handles[file]
        return handle.get_tensor(name) if index is None else handle.get_slice(name)[index]


class _Meter:
    """Counts bytes over all reading threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            if self._progress is not None:
                self._progress(self.done, self._total)
