"""Bytes and shapes of blocks, against worked-out numbers."""

from __future__ import annotations

import pytest
import torch

from kv_cache.layout import KVLayout, LayerScales
from kv_cache.pool import KVPool


def test_gqa_bytes_of_mixtral_8x7b() -> None:
    """32 layers, 8 KV heads of width 128, bf16: 128 KiB a token, a number anyone can look up."""
    layout = KVLayout.gqa(32, 16, 8, 128, torch.bfloat16)
    assert layout.bytes_per_token == 131_072
    assert layout.bytes_per_block == 2_097_152
    assert layout.layer_shape(7) == (7, 2, 16, 8, 128)


def test_mla_bytes_of_deepseek_v3() -> None:
    """61 layers of 512 + 64 values in bf16: 70,272 bytes a token."""
    layout = KVLayout.mla(61, 16, 512, 64, torch.bfloat16)
    assert layout.bytes_per_token == 70_272
    assert layout.layer_shape(3) == (3, 16, 576)


def test_fp8_bytes_of_mixtral_8x7b() -> None:
    """A byte an entry, four for each of 2 x 8 scales: 64 KiB and 2 KiB a token. Scales of a layer take none."""
    layout = KVLayout.gqa(32, 16, 8, 128, torch.bfloat16, "fp8")
    assert layout.bytes_per_token == 65_536 + 2_048
    assert layout.layer_shape(7) == (7, 16 * (2 * 8 * 128 + 2 * 8 * 4))
    of_layer = KVLayout.gqa(32, 16, 8, 128, torch.bfloat16, "fp8-layer", (LayerScales(0.04, 0.05),) * 32)
    assert of_layer.bytes_per_token == 65_536 and of_layer.layer_shape(7) == (7, 2, 16, 8, 128)


def test_int4_bytes_of_mixtral_8x7b() -> None:
    """Half a byte an entry, and four numbers of two bytes for each of 2 x 8 heads: 32 KiB and 4 KiB a token."""
    layout = KVLayout.gqa(32, 16, 8, 128, torch.bfloat16, "int4")
    assert layout.bytes_per_token == 32_768 + 4_096


def test_fp8_bytes_of_deepseek_v3() -> None:
    """576 bytes and two scales in each of 61 layers."""
    assert KVLayout.mla(61, 64, 512, 64, torch.bfloat16, "fp8").bytes_per_token == 61 * (576 + 8)


@pytest.mark.parametrize(
    ("layout", "values", "scales"),
    [
        (KVLayout.gqa(1, 4, 3, 10, torch.bfloat16, "fp8"), (5, 2, 4, 3, 10), (5, 2, 4, 3)),
        (KVLayout.gqa(1, 1, 1, 6, torch.bfloat16, "int4"), (5, 2, 1, 1, 3), (5, 2, 1, 1, 4)),
        (KVLayout.mla(1, 2, 5, 2, torch.bfloat16, "fp8"), (5, 2, 7), (5, 2, 2)),
    ],
)
def test_values_and_scales_are_views_that_do_not_overlap(layout, values, scales) -> None:
    """Odd sizes: what lies between them is padding, so that both begin at multiples of 16 bytes in every block."""
    layer = KVPool(layout, 5, "cpu").layers[0]
    values_of, scales_of = layout.values(layer), layout.scales(layer)
    assert scales_of is not None and values_of.shape == values and scales_of.shape == scales
    values_of.view(torch.uint8).fill_(0x38)
    assert bool((scales_of == 0).all())
    scales_of.fill_(3.0)
    assert bool((values_of.view(torch.uint8) == 0x38).all())
    for view in (values_of, scales_of):
        assert view.data_ptr() % 16 == layer.data_ptr() % 16 and view.stride(0) * view.element_size() % 16 == 0


def test_what_cannot_be_int4_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache.dtype=int4 packs two entries .* head_dim=7 is odd"):
        KVLayout.gqa(1, 16, 1, 7, torch.bfloat16, "int4")
    with pytest.raises(ValueError, match=r"cache.dtype=int4 is not offered for latent attention"):
        KVLayout.mla(1, 16, 512, 64, torch.bfloat16, "int4")


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout.gqa(3, 8, 2, 4, torch.float32),
        KVLayout.mla(2, 4, 6, 2, torch.float16),
        KVLayout.gqa(2, 2, 3, 10, torch.bfloat16, "fp8"),
        KVLayout.gqa(2, 2, 3, 10, torch.bfloat16, "fp8-layer", (LayerScales(0.04, 0.05),) * 2),
        KVLayout.gqa(2, 2, 3, 10, torch.bfloat16, "int4"),
        KVLayout.mla(2, 4, 6, 2, torch.bfloat16, "fp8"),
    ],
)
def test_a_pool_takes_the_bytes_its_layout_says(layout: KVLayout) -> None:
    pool = KVPool(layout, 5, "cpu")
    assert len(pool.layers) == layout.num_layers
    assert sum(layer.numel() * layer.element_size() for layer in pool.layers) == pool.num_bytes
    assert pool.num_bytes == 5 * layout.bytes_per_block
    assert all(bool((layer.view(torch.uint8) == 0).all()) for layer in pool.layers), "stale memory must not hold NaN"


@pytest.mark.parametrize("size", [0, -16, 12, 512])
def test_block_size_is_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=rf"cache.block_size={size} must be a power of two from 1 to 256"):
        KVLayout.gqa(1, size, 1, 8, torch.float32)


def test_C49_scales_of_a_layer_are_one_number_for_all_its_blocks() -> None:
    """And part of what keys of a prefix cache begin with."""
    scales = (LayerScales(0.04, 0.05), LayerScales(0.5, 0.25))
    gqa = KVLayout.gqa(2, 4, 3, 8, torch.bfloat16, "fp8-layer", scales)
    mla = KVLayout.mla(2, 4, 16, 8, torch.bfloat16, "fp8-layer", scales)
    for index, (key, value) in enumerate(scales):
        of_heads, of_latents = (KVPool(layout, 5, "cpu").caches[index].scales for layout in (gqa, mla))
        assert of_heads is not None and of_heads.shape == (5, 2, 4, 3) and of_heads.untyped_storage().nbytes() == 8
        assert bool((of_heads[:, 0] == torch.tensor(key)).all()) and bool((of_heads[:, 1] == torch.tensor(value)).all())
        assert of_latents is not None and of_latents.shape == (5, 4, 2) and of_latents.stride(-1) == 1
        assert bool((of_latents == torch.tensor(key)).all())
    other = KVLayout.gqa(2, 4, 3, 8, torch.bfloat16, "fp8-layer", (scales[0], LayerScales(0.5, 0.26)))
    assert len({gqa.salt, other.salt, KVLayout.gqa(2, 4, 3, 8, torch.bfloat16, "fp8").salt}) == 3
    with pytest.raises(AssertionError, match="1 layers have scales, wanted 2"):
        KVLayout.gqa(2, 4, 3, 8, torch.bfloat16, "fp8-layer", scales[:1])
