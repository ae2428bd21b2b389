"""The largest steps of an engine on a GPU that is not there: every tensor is made, with its size and no memory; no
kernel is launched. `python -m tests.shadow_steps` reads a list of cases and writes what of each lived at the same time.

Torch's fake tensors say which tensors an operation makes; here they are on a GPU of compute capability 9.0 or 8.0. It
changes torch for the whole process, so tests run it in one of its own. What it cannot see is memory inside an
operation of the vendor's libraries.
"""

# Torch and Triton are replaced in part.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.runtime.jit
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kv_cache.pool import KVPool
from moe.engine.measure import decode_step, prefill_step
from moe.engine.request import SamplingParams
from moe.engine.resolve import kv_layout
from moe.engine.sampler import Sampler, SampleRow, SamplingBatch
from moe.engine.workspace import StepLimits
from moe.model.causal_lm import CausalLM
from moe.model.config import MLAConfig
from moe.model.families.registry import read_config
from moe.model.linear import product_of_rows
from moe.model.mla import MLAttention

aten = torch.ops.aten
GRANULE = 512  # torch's allocator gives whole ones


class LiveTensors(TorchDispatchMode):
    """Bytes of the tensors on the GPU that exist, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = -(-storage.nbytes() // GRANULE) * GRANULE

        def gone(_: object) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def _view(x: Tensor, index: Any) -> Tensor:
    """x[index] without the device guard of torch's own, which needs a GPU."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        given = sum(part is not None and part is not Ellipsis for part in parts)
        parts[at : at + 1] = [slice(None)] * (x.dim() - given)
    dim, gathered = 0, {}
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, Tensor):
            gathered[dim] = part
        elif isinstance(part, slice):
            start, stop, step = part.indices(x.shape[dim])
            x = aten.slice.Tensor(x, dim, start, max(start, stop), step)
        else:
            x = x.select(dim, part)
            continue
        dim += 1
    return aten.index.Tensor(x, [gathered.get(at) for at in range(max(gathered) + 1)]) if gathered else x


def _store(x: Tensor, index: Any, value: Any) -> None:
    parts = index if isinstance(index, tuple) else (index,)
    if all(isinstance(part, Tensor) for part in parts):
        aten.index_put_(x, list(parts), value)
    else:
        aten.copy_.default(_view(x, index), value)


def _whole(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)


def install() -> None:
    """Torch as if it had a GPU, for good: the process is of no other use."""
    triton.runtime.jit.JITFunction.run = lambda self, *args, **kwargs: None
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    torch.cuda.Stream = lambda *args, **kwargs: None
    for name, on_gpu in (("__getitem__", _view), ("__setitem__", _store), ("contiguous", _whole)):
        _replace(name, on_gpu)
    Tensor.pin_memory = lambda self, *args: self


@contextmanager
def shadow_gpu(capability: tuple[int, int]) -> Iterator[LiveTensors]:
    """Tensors on a GPU of this compute capability are counted, after `install`."""
    torch.cuda.get_device_capability = lambda device=None: capability
    live = LiveTensors()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        yield live


def _replace(name: str, on_gpu: Any) -> None:
    real = getattr(Tensor, name)
    setattr(Tensor, name, lambda self, *args, **kwargs: (on_gpu if self.is_cuda else real)(self, *args, **kwargs))


def peaks(case: dict[str, Any]) -> dict[str, int]:
    """Of a network cut to `layers` layers: bytes of the prefill and the decode step at most, each from the state
    before; and of what the network holds beside its parameters."""
    device, limits = torch.device("cuda", 0), StepLimits(**case["limits"])
    model = read_config(Path(case["folder"]))
    cut = case["layers"]
    model = replace(
        model,
        num_layers=len(cut),
        sparse_layers=tuple(model.sparse_layers[index] for index in cut),
        sliding_windows=tuple(model.sliding_windows[index] for index in cut),
        fp8_experts=case["fp8"],
    )
    if case["heads"] is not None:
        model = replace(model, attention=replace(model.attention, num_heads=case["heads"]))
    found: dict[str, int] = {}
    with shadow_gpu(tuple(case["capability"])) as live:
        network = CausalLM(
            model,
            dtype=torch.bfloat16,
            device=device,
            max_model_len=limits.max_model_len,
            mla_workspace_tokens=limits.mla_tokens,
        )
        for block in network.blocks:
            if isinstance(block.attention, MLAttention):
                block.attention.finalize()
        for linear in network.parameters.linears.values():
            linear.product = product_of_rows([], linear.product)[1]
        found["held"] = live.now - sum(-(-t.nbytes // GRANULE) * GRANULE for t in network.targets().values())
        layout = kv_layout(model, limits.block_size, torch.bfloat16, "auto", device)
        pool, sampler = KVPool(layout, 1, device), Sampler(model.vocab_size)
        latent = isinstance(model.attention, MLAConfig)
        steps = {
            "prefill": prefill_step(limits, device, latent=latent),
            "decode": decode_step(limits.max_num_seqs, limits.max_model_len, limits.block_size, device),
        }
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
        for name, step in steps.items():
            before = live.most = live.now
            with torch.inference_mode():
                logits_BV = network.forward(step, pool.caches)[: limits.max_num_seqs]
                rows = [SampleRow(params, 0, 1, [0], [])] * logits_BV.shape[0]
                sampler.sample(logits_BV, SamplingBatch.build(rows, device))
            del logits_BV
            found[name] = live.most - before
    return found


if __name__ == "__main__":
    install()
    print(json.dumps([peaks(case) for case in json.load(sys.stdin)]))
