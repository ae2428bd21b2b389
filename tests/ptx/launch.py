"""Lets the launchers of kernels/ run where there is no GPU: CPU tensors pose as those of an H100, and a launch compiles
its kernel for sm_90, specialised as it would be there, and runs the PTX on `tests/ptx/machine.py`.

    hopper = Hopper()
    with hopper.posing():
        y_MN = linear_triton(x_MK, w_NK)

One launch ends before the next begins: what kernels do ahead of their wait for it is not put to the test. Needs
Triton's compiler, but not the assembler behind it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.ptx.machine import Code, Machine
from tests.ptx.memory import Global
from tests.ptx.program import Program, parse
from tests.ptx.transfers import Descriptor

_TARGET = GPUTarget("cuda", 90, 32)


class Hopper:
    """A GPU that is not there. `multiprocessors`: what launchers are told; `resident`: how many programs run at once.
    Keeps what it has compiled: one for a module of tests."""

    def __init__(self, *, multiprocessors: int = 3, resident: int = 2) -> None:
        self.multiprocessors, self.resident = multiprocessors, resident
        self.launches: list[str] = []
        """Names of kernels, as they were launched."""
        # Launchers keep what they have asked of a device: no real one has this number.
        self._device = torch.device("cuda", 64 + multiprocessors)
        self._backend = make_backend(_TARGET)
        self._bind: dict[Any, Callable[..., Any]] = {}
        self._compiled: dict[str, tuple[Any, Program]] = {}
        self._code: dict[str, Code] = {}

    @contextlib.contextmanager
    def posing(self, *, seed: int = 0, change: Callable[[Program], Program] | None = None) -> Iterator[None]:
        """What is launched in here runs on the machine. `seed`: of the order of all that may be in any; `change`: what
        to do to each program first."""
        chance = random.Random(seed)

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            machine = self._machine(kernel, args, grid, options, change)
            self.launches.append(machine.code.program.name)
            machine.run(resident=self.resident, chance=chance)

        properties = SimpleNamespace(multi_processor_count=self.multiprocessors, major=9, minor=0)
        with contextlib.ExitStack() as stack:
            for patched in (
                mock.patch.object(JITFunction, "run", run),
                mock.patch.object(GluonJITFunction, "run", run),
                mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""),
                mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
                mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
                mock.patch.object(torch.cuda, "get_device_name", lambda *_: "a machine of PTX"),
                knobs.cache.scope(),
                _Posing(self._device),
            ):
                stack.enter_context(patched)
            # No stub of a binary is to be found where real ones are looked for.
            knobs.cache.dir = stack.enter_context(TemporaryDirectory())
            yield

    def _machine(self, kernel: Any, args: Any, grid: Any, options: Any, change: Any) -> Machine:
        bind = self._bind.get(kernel)
        if bind is None:
            bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._bind[kernel] = bind
        bound, specialization, _ = bind(*args, **options)
        key = repr((kernel.fn.__qualname__, specialization, _constants(bound, specialization), sorted(options.items())))
        if key not in self._compiled:
            self._compiled[key] = self._compile(kernel, options, bound, specialization)
        metadata, program = self._compiled[key]
        if change is not None:
            code = Code(change(program))
        else:
            code = self._code.get(key) or self._code.setdefault(key, Code(program))
        values, tensors, descriptors = _arguments(bound, specialization, metadata)
        values += [0] * (len(program.params) - len(values))  # scratch that these kernels do not use
        whole = tuple(grid(bound) if callable(grid) else grid)
        return Machine(
            code,
            dict(zip(program.params, values, strict=True)),
            Global(tensors),
            descriptors,
            (*whole, 1, 1)[:3],
            metadata.shared,
        )

    def _compile(self, kernel: Any, options: Any, bound: Any, specialization: Any) -> tuple[Any, Program]:
        packed = kernel._pack_args(self._backend, dict(options), bound, specialization, dict(options))
        parsed, signature, constexprs, attrs = packed
        source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        compiled = triton.compile(source(kernel, signature, constexprs, attrs), target=_TARGET, options=parsed.__dict__)
        return compiled.metadata, parse(compiled.asm["ptx"])


def _constants(bound: dict[str, Any], specialization: list[Any]) -> list[str]:
    return [repr(value) for value, (kind, _) in zip(bound.values(), specialization) if kind == "constexpr"]


def _arguments(
    bound: dict[str, Any], specialization: list[Any], metadata: Any
) -> tuple[list[int | float], list[Tensor], dict[int, Descriptor]]:
    """What the kernel's parameters are given, one by one; the tensors they point to; descriptors by their address."""
    values: list[int | float] = []
    tensors: list[Tensor] = []
    descriptors: dict[int, Descriptor] = {}
    metas = iter(metadata.tensordesc_meta or ())
    for value, (kind, _) in zip(bound.values(), specialization):
        if kind == "constexpr":
            continue
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            meta, tensor = next(metas), value.base
            item = tensor.element_size()
            address = 1 << 60 | len(descriptors) << 8
            descriptors[address] = Descriptor(
                tensor.data_ptr(),
                tuple(value.shape),
                tuple(stride * item for stride in value.strides),
                tuple(meta["block_size"]),
                item,
                {0: 1, 1: 2, 2: 4, 3: 8}[meta["swizzle"]],
            )
            assert all(stride * item % 16 == 0 for stride in value.strides[:-1]), "strides that no copy engine takes"
            assert tensor.data_ptr() % 16 == 0, "an address that no copy engine takes"
            values += [address, *value.shape, *value.strides]
            tensors.append(tensor)
        elif isinstance(value, Tensor):
            values.append(value.data_ptr())
            tensors.append(value)
        else:
            assert isinstance(value, (int, float)), f"an argument that is not known: {value!r}"
            values.append(value)
    return values, tensors, descriptors


class _Posing(TorchFunctionMode):
    """Tensors say that they are on a GPU; what is asked to be there is on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name == "__get__" and owner is Tensor.device:
            return self._device
        if name == "__get__" and owner is Tensor.is_cuda:
            return True
        kwargs = {word: self._real(value) for word, value in (kwargs or {}).items()}
        return func(*(self._real(value) for value in args), **kwargs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value == "cuda" else value
