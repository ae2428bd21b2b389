"""Bytes and shapes of blocks, against worked-out numbers."""

from __future__ import annotations

import pytest
import torch

from kv_cache.layout import KVLayout
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


@pytest.mark.parametrize("layout", [KVLayout.gqa(3, 8, 2, 4, torch.float32), KVLayout.mla(2, 4, 6, 2, torch.float16)])
def test_a_pool_takes_the_bytes_its_layout_says(layout: KVLayout) -> None:
    pool = KVPool(layout, 5, "cpu")
    assert len(pool.layers) == layout.num_layers
    assert sum(layer.numel() * layer.element_size() for layer in pool.layers) == pool.num_bytes
    assert pool.num_bytes == 5 * layout.bytes_per_block
    assert all(bool((layer == 0).all()) for layer in pool.layers), "stale memory must not hold NaN"


@pytest.mark.parametrize("size", [0, -16, 12, 512])
def test_block_size_is_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=rf"cache.block_size={size} must be a power of two from 1 to 256"):
        KVLayout.gqa(1, size, 1, 8, torch.float32)
