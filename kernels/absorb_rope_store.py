"""What latents and queries of a step of decode rows go through before attention, in one launch.

    q_latent = W_UK q_nope, head by head; all else as kernels/latent_rope_store.py has it, which holds the kernel

Knows latents, positions and slots; knows nothing of layers. Neither part waits for the other. One H200, layers of
dsv2-lite in graphs, 64 rows: 353.1 us in two launches, 350.8 in one.
"""

from __future__ import annotations

from torch import Tensor

from kernels.checks import assert_shape, uses_triton
from kernels.latent_rope_store import Absorbed, check_latents, latent_rope_store_reference, launch_latents
from kernels.linear import head_linear_reference
from kernels.turn_heads import Rope


def absorb_rope_store(
    q_THC: Tensor,
    w_HLn: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None = None,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> Tensor:
    """q_latent_THL[t, h] = w_HLn[h] q_THC[t, h, :n], and `latent_rope_store` of the queries' entries from n on.

    w_HLn is contiguous. `absorb_rope_store_reference` is the definition.
    """
    run = absorb_rope_store_triton if uses_triton(kv_TX) else absorb_rope_store_reference
    given_scales = {"given": given, "saturated_1": saturated_1}
    return run(q_THC, w_HLn, kv_TX, norm_L, eps, rope, cache_NPX, slot_mapping_T, scales_NP2, **given_scales)


def absorb_rope_store_triton(
    q_THC: Tensor,
    w_HLn: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None = None,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> Tensor:
    """`absorb_rope_store` as one launch."""
    q_nope_THn, q_pe_THR = _check_absorbed(q_THC, w_HLn, norm_L)
    check_latents(q_pe_THR, kv_TX, norm_L, rope, cache_NPX, slot_mapping_T, scales_NP2)
    absorbed = Absorbed(q_nope_THn, w_HLn, q_THC.new_empty(*q_THC.shape[:2], norm_L.shape[0]))
    stored = (kv_TX, norm_L, eps, rope, cache_NPX, slot_mapping_T, scales_NP2, given, saturated_1)
    launch_latents(q_pe_THR, *stored, absorbed)
    return absorbed.y_THL


def _check_absorbed(q_THC: Tensor, w_HLn: Tensor, norm_L: Tensor) -> tuple[Tensor, Tensor]:
    """The queries' entries before and from n on."""
    assert_shape("w_HLn", w_HLn, (q_THC.shape[1], norm_L.shape[0], None))
    assert w_HLn.is_contiguous() and w_HLn.dtype == q_THC.dtype, "w_HLn is one block of the queries' dtype"
    return q_THC[..., : w_HLn.shape[2]], q_THC[..., w_HLn.shape[2] :]


def absorb_rope_store_reference(
    q_THC: Tensor,
    w_HLn: Tensor,
    kv_TX: Tensor,
    norm_L: Tensor,
    eps: float,
    rope: Rope,
    cache_NPX: Tensor,
    slot_mapping_T: Tensor,
    scales_NP2: Tensor | None = None,
    *,
    given: bool = False,
    saturated_1: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU's product path: the references, one after another."""
    q_nope_THn, q_pe_THR = _check_absorbed(q_THC, w_HLn, norm_L)
    stored = (kv_TX, norm_L, eps, rope, cache_NPX, slot_mapping_T, scales_NP2)
    latent_rope_store_reference(q_pe_THR, *stored, given=given, saturated_1=saturated_1)
    return head_linear_reference(q_nope_THn, w_HLn)
