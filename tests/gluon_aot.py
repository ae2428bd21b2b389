"""Compiles a Gluon kernel ahead of time for Hopper, as `tests/aot.py` does for Triton's kernels. Runs nothing.

compile_gluon_ahead(_kernel, {"x_ptr": "*bf16", "desc": box("bf16", 16, 64), "n": "i32", "BLOCK": 128})
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.aot import SHARED_MEMORY


def box(dtype: str, *shape: int) -> str:
    """The type string of a descriptor whose boxes are swizzled by 128 bytes."""
    bits = 8 if dtype.startswith("fp8") else 16
    return f"tensordesc<{dtype}{list(shape)},{gl.NVMMASharedLayout(128, bits, len(shape))!r}>"


def compile_gluon_ahead(kernel, args: Mapping[str, object], *, num_warps: int = 4) -> str:
    """The PTX of `kernel` for sm_90; raises what the compiler raises, and where it could not be launched.

    `args` as `compile_ahead` takes them. Pointers are multiples of 16, as are integers that begin with "stride_" except
    those of tables.
    """
    wanted = {parameter.name for parameter in kernel.params}
    assert wanted == set(args), f"parameters missing: {wanted - set(args)}, unknown: {set(args) - wanted}"
    signature, constexprs, attrs = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, args[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constexprs[(index,)] = value
            continue
        assert isinstance(value, str), f"{name} is a runtime value; {value!r} is no type string"
        signature[name] = value
        if value.startswith("*") or (name.startswith("stride_") and name != "stride_tb"):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constexprs, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    shared = compiled.metadata.shared
    assert shared <= SHARED_MEMORY[90], f"{shared} bytes of shared memory; sm_90 has {SHARED_MEMORY[90]}"
    return compiled.asm["ptx"]
