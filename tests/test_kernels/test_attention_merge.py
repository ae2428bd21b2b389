"""The merge of two parts: by hand, and empty parts that weigh nothing, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_merge import (
    _merge_kernel,
    merge_attention,
    merge_attention_reference,
    merge_attention_triton,
)
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.paged_cache import draw


def check_merge(merge, device):
    out_a, out_b = draw(3, 2, 24, device=device), draw(3, 2, 24, device=device, seed=1)
    lse_a, lse_b = draw(3, 2, device=device, seed=2), draw(3, 2, device=device, seed=3)
    lse_b[0] = lse_a[1] = -torch.inf
    lse_a[2, 1] = lse_b[2, 1] = -torch.inf
    wanted = torch.where(lse_b[..., None] == -torch.inf, out_a, out_b)
    wanted[2, 1] = 0
    weight = (lse_a[2, 0] - torch.logaddexp(lse_a[2, 0], lse_b[2, 0])).exp()
    wanted[2, 0] = weight * out_a[2, 0] + (1 - weight) * out_b[2, 0]
    out_b[0] = out_a[1] = out_a[2, 1] = torch.nan
    out_b[2, 1] = torch.inf
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    # An empty part leaves the other one as it was, bit for bit.
    assert_same_bits(out[:2], wanted[:2])
    assert_same_bits(lse[:2], torch.maximum(lse_a, lse_b)[:2])
    assert (out[2, 1] == 0).all() and lse[2, 1] == -torch.inf
    assert max_rel(out[2, 0], wanted[2, 0]) < 1e-6
    assert max_rel(lse[2, 0], torch.logaddexp(lse_a[2, 0], lse_b[2, 0])) < 1e-6
    assert merge(out_a[:0], lse_a[:0], out_b[:0], lse_b[:0])[0].shape == (0, 2, 24)


def test_merge_kernel(backend):
    check_merge(merge_attention_triton, backend.device)


@pytest.mark.parametrize("merge", [merge_attention, merge_attention_reference])
def test_merge_reference(merge):
    check_merge(merge, "cpu")


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_merge_kernel_compiles_ahead_of_time(arch):
    pointers = dict.fromkeys(("out_a_ptr", "lse_a_ptr", "out_b_ptr", "lse_b_ptr", "out_ptr", "lse_ptr"), "*fp32")
    strides = ("at", "ah", "av", "lat", "lah", "bt", "bh", "bv", "lbt", "lbh")
    args = {**pointers, "num_heads": "i32", **{f"stride_{name}": "i32" for name in strides}}
    compile_ahead(_merge_kernel, arch, {**args, "VALUE_WIDTH": 128, "BLOCK_V": 128}, num_warps=1)
