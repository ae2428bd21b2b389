"""Compiles a Triton kernel ahead of time, for GPUs this machine need not have: does it build for every supported card?

Knows signatures and architectures; runs nothing. Not for the interpreter's process, where a kernel is plain Python.

    @aot
    @pytest.mark.parametrize("arch", ARCHS)
    def test_compiles(arch):
        compile_ahead(_add_kernel, arch, {"x_ptr": "*bf16", "n": "i32", "bias_ptr": None, "BLOCK": 128}, num_warps=4)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHS = (80, 89, 90, 100)
"""Compute capabilities x 10: A100, RTX 40 / L4, H100 and H200, B200."""

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The most bytes one program may take: what builds and needs more cannot be launched."""

aot = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's process holds no compilable kernels"
)


def compile_ahead(
    kernel,
    arch: int,
    args: Mapping[str, object],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: bool = True,
) -> bytes:
    """The cubin of `kernel` for sm_`arch`; raises what the compiler raises, and where it could not be launched.

    `args` names every parameter: a type string ("*bf16", "*i32", "i32", "i64", "fp32") where the kernel takes a runtime
    value, a tuple of them for a tuple, the value where it is `tl.constexpr`, None for an absent pointer, 1 for an
    integer that is 1 (Triton compiles both in). `aligned`: pointers and integers are multiples of 16, as the usual
    sizes are; False is for odd ones.
    """
    wanted = {parameter.name for parameter in kernel.params}
    assert wanted == set(args), f"parameters missing: {wanted - set(args)}, unknown: {set(args) - wanted}"
    signature, constexprs, attrs = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = args[parameter.name]
        if parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name] = "constexpr"
            constexprs[(index,)] = value
            continue
        if isinstance(value, tuple):
            signature[parameter.name] = value
            attrs |= {(index, place): [["tt.divisibility", 16]] for place in range(len(value) if aligned else 0)}
            continue
        assert isinstance(value, str), f"{parameter.name} is a runtime value; {value!r} is no type string"
        signature[parameter.name] = value
        if aligned and not value.startswith("fp"):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    shared = compiled.metadata.shared
    assert shared <= SHARED_MEMORY[arch], f"{shared} bytes of shared memory; sm_{arch} has {SHARED_MEMORY[arch]}"
    return compiled.asm["cubin"]
