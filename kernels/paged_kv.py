"""What attention may be given as paged keys and values, in any of their dtypes. Knows shapes, dtypes and strides."""

from __future__ import annotations

from torch import Tensor

from kernels.checks import assert_last_contiguous, assert_shape
from kernels.kv_int4 import Int4Scales, check_int4_caches
from kernels.kv_quantize import KVScales, check_kv_scales


def check_paged_kv(
    q_THC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    scales: KVScales | Int4Scales | None,
    key_width: int,
) -> None:
    """Assert that these queries may read these caches. `key_width`: columns of a key that lie in the cache."""
    num_heads = q_THC.shape[1]
    num_blocks, page_size, num_kv_heads, _ = k_cache_NPGC.shape
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} kv heads"
    stored_width = key_width // 2 if isinstance(scales, Int4Scales) else key_width
    assert_shape("k_cache_NPGC", k_cache_NPGC, (num_blocks, page_size, num_kv_heads, stored_width))
    assert_shape("v_cache_NPGV", v_cache_NPGV, (num_blocks, page_size, num_kv_heads, None))
    for name, x in (("q", q_THC), ("k_cache_NPGC", k_cache_NPGC), ("v_cache_NPGV", v_cache_NPGV)):
        assert_last_contiguous(name, x)
    if isinstance(scales, Int4Scales):
        assert_shape("v_cache_NPGV", v_cache_NPGV, tuple(k_cache_NPGC.shape))
        check_int4_caches(k_cache_NPGC, v_cache_NPGV, scales)
    else:
        check_kv_scales(k_cache_NPGC, v_cache_NPGV, scales, q_THC.dtype)
