"""The queries' way into the latent space beside the cache write: the bits of the two launches that it stands for."""

from __future__ import annotations

import pytest
import torch

from kernels.absorb_rope_store import absorb_rope_store, absorb_rope_store_reference, absorb_rope_store_triton
from kernels.latent_rope_store import _latent_rope_store_kernel, latent_rope_store_reference, latent_rope_store_triton
from kernels.linear import head_linear_reference, head_linear_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import assert_same_as_separate, assert_same_bits, max_rel
from tests.paged_cache import draw
from tests.test_kernels.test_latent_rope_store import compiled, operands


@pytest.mark.parametrize(
    ("num_tokens", "heads", "latent", "rotated"),
    [
        pytest.param(0, 2, 32, 8, id="no-rows"),
        pytest.param(1, 16, 512, 64, id="deepseek-v2-lite"),
        pytest.param(70, 3, 40, 12, id="two-tiles-of-rows-and-odd-sizes"),
        pytest.param(17, 1, 80, 2, id="two-tiles-of-columns"),
    ],
)
def test_kernel(backend, num_tokens, heads, latent, rotated):
    q_THC, args = operands(num_tokens, heads, latent, rotated, backend.dtype, backend.device, interleaved=True)
    w_HLn = draw(heads, latent, 24, dtype=backend.dtype, device=backend.device, seed=5)
    wanted_q, wanted_cache = q_THC.clone(), args[4].clone()
    latent_rope_store_triton(wanted_q[..., -rotated:], *args[:4], wanted_cache, args[5])
    ours = absorb_rope_store_triton(q_THC, w_HLn, *args)
    assert_same_as_separate(q_THC, wanted_q)
    assert_same_as_separate(args[4], wanted_cache)
    if num_tokens:
        assert max_rel(ours, head_linear_reference(q_THC[..., :24], w_HLn)) < 1e-2
    else:
        assert ours.shape == (0, heads, latent)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 256])
def test_products_have_the_bits_of_their_own_launch(num_tokens):
    q_THC, args = operands(num_tokens, 16, 512, 64, torch.bfloat16, "cuda", interleaved=True, nope=128)
    w_HLn = draw(16, 512, 128, dtype=torch.bfloat16, device="cuda", seed=5)
    assert_same_bits(absorb_rope_store_triton(q_THC, w_HLn, *args), head_linear_triton(q_THC[..., :128], w_HLn))


def test_reference_is_both_one_after_another():
    q_THC, args = operands(9, 3, 32, 8, torch.float32, "cpu", interleaved=False)
    w_HLn = draw(3, 32, 24, seed=5)
    wanted_q, wanted_cache = q_THC.clone(), args[4].clone()
    latent_rope_store_reference(wanted_q[..., -8:], *args[:4], wanted_cache, args[5])
    ours = absorb_rope_store(q_THC, w_HLn, *args)
    assert_same_bits(ours, head_linear_reference(wanted_q[..., :24], w_HLn))
    assert_same_bits(q_THC, wanted_q)
    assert_same_bits(args[4], wanted_cache)


def test_weights_that_do_not_fit_are_refused():
    q_THC, args = operands(3, 2, 32, 8, torch.float32, "cpu", interleaved=True)
    with pytest.raises(AssertionError, match="w_HLn"):
        absorb_rope_store_reference(q_THC, draw(2, 33, 24), *args)


@aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_m", [16, 64])
def test_compiles_beside_the_store(arch, block_m):
    args = compiled(arch) | dict.fromkeys(("nope_ptr", "w_ptr", "y_ptr"), "*bf16") | {"BLOCK_R": 2, "TOKENS": 1}
    assert compile_ahead(_latent_rope_store_kernel, arch, args | {"NOPE": 128, "BLOCK_M": block_m, "BLOCK_K": 128})
