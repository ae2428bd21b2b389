"""The merge of MLA's splits with the product behind it: against both alone, and bit for bit on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import head_linear, head_linear_reference
from kernels.mla_decode import mla_decode
from kernels.mla_decode_hopper import list_rule, split_rule
from kernels.mla_merge import Splits, merge_parts
from kernels.mla_order import list_pieces
from kernels.mla_values import _value_rows_kernel, _values_kernel, mla_decode_values, values_of_splits
from kernels.split_kv import SplitRule
from tests.aot import aot, compile_ahead
from tests.compare import assert_same_bits, max_rel
from tests.paged_cache import draw, index, paged_cache
from tests.test_kernels.test_mla_decode_hopper import draw_case


def drawn_splits(lens, whole, heads, latent, dtype, device):
    """NaN wherever nothing was written: in parts that there are none of or that are merged, and in `out` elsewhere."""
    rule = SplitRule(128, few=8)
    most = rule.most(max(lens))
    parts_BSHL = draw(len(lens), most, heads, latent, dtype=torch.float16, device=device)
    lse_BSH = draw(len(lens), most, heads, device=device, seed=1) * 5
    out_BHL = draw(len(lens), heads, latent, dtype=dtype, device=device, seed=2)
    for b, n in enumerate(lens):
        length = next(times * 128 for times in (1, 2, 4) if times == 4 or n <= times * 8 * 128)
        count = 0 if whole[b] else -(-n // length)
        parts_BSHL[b, count:], lse_BSH[b, count:] = torch.nan, torch.nan
        if count > 1:
            out_BHL[b] = torch.nan
    return Splits(parts_BSHL, lse_BSH, index(whole, device), out_BHL, rule)


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([600], id="one"),
        pytest.param([0, 1000, 128, 600, 129], id="few"),
        pytest.param([1 + 97 * b % 1000 for b in range(17)] + [0, 129], id="two-tiles"),
        pytest.param([40, 128, 7], id="nothing-to-merge"),
        pytest.param([5000, 1025, 3000, 4097], id="more-splits-than-come-at-once"),
    ],
)
@pytest.mark.parametrize("some_whole", [False, True])
def test_values(backend, lens, some_whole):
    """Weights as a view of wider ones, of an odd number of columns."""
    heads, latent = 3, 64
    whole = [int(some_whole and b % 4 == 2) for b in range(len(lens))]
    splits = drawn_splits(lens, whole, heads, latent, backend.dtype, backend.device)
    splits = splits if some_whole else splits._replace(whole_B=None)
    w_HVL = draw(heads, 8 + 70, latent, dtype=backend.dtype, device=backend.device, seed=3)[:, 8:]
    ours = values_of_splits(splits, index(lens, backend.device), w_HVL)
    merge_parts(splits, index(lens, backend.device))
    assert max_rel(ours, head_linear_reference(splits.out_BHL, w_HVL)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("others", [0, 7, 40, 300])
@pytest.mark.parametrize("heads", [16, 64], ids=["few-heads", "heads-with-a-list"])
def test_bits_of_decode_and_product(heads, others):
    """With many heads also of a list that is given."""
    lens = [1 + 37 * b % 1500 for b in range(others)] + [1, 64, 100, 0, 257, 1025, 2000, 4097]
    q_BHX, cache_NPX, cache = draw_case(heads, 16, lens)
    w_HVL = draw(heads, 256, 512, dtype=torch.bfloat16, device="cuda", seed=3)[:, 128:]

    def run(rows: slice, max_kv_len: int):
        q_BHx = q_BHX[rows]
        operands = (q_BHx[..., :512], q_BHx[..., 512:], cache_NPX, cache.block_tables_BM[rows], cache.kv_lens_B[rows])
        both = mla_decode_values(*operands, w_HVL, scale=0.05, max_kv_len=max_kv_len)
        assert_same_bits(both, head_linear(mla_decode(*operands, scale=0.05, max_kv_len=max_kv_len), w_HVL))
        rule = list_rule(*operands[:3])
        if rule is not None:
            pieces = list_pieces(operands[4], rule, max_kv_len=max_kv_len)
            torch.cuda.synchronize()  # attention reads it ahead of the launch before it
            listed = mla_decode_values(*operands, w_HVL, scale=0.05, max_kv_len=max_kv_len, pieces=pieces)
            assert_same_bits(listed, both)
        return both

    together = run(slice(None), max(lens))
    for b in range(len(lens)):
        assert_same_bits(run(slice(b, b + 1), 8192), together[b : b + 1])


def test_on_a_cpu_it_is_decode_and_then_the_product():
    lens = [5, 300]
    cache = paged_cache(lens, page=16, width=40)
    cache_NPX = cache.k_cache_NPGC[:, :, 0].contiguous()
    q_BHX, w_HVL = draw(2, 3, 40, seed=1), draw(3, 24, 32, seed=2)
    operands = (q_BHX[..., :32], q_BHX[..., 32:], cache_NPX, cache.block_tables_BM, cache.kv_lens_B)
    ours = mla_decode_values(*operands, w_HVL, scale=0.1, max_kv_len=300)
    assert_same_bits(ours, head_linear_reference(mla_decode(*operands, scale=0.1, max_kv_len=300), w_HVL))


@aot
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("heads", [16, 64])
def test_compiles_where_it_serves(heads, rows):
    """With many heads attention writes no `whole_B`."""
    rule = split_rule(heads)
    pointers = {"parts_ptr": "*fp16", "lse_ptr": "*fp32", "kv_lens_ptr": "*i32"}
    pointers |= {"whole_ptr": "*i32" if heads == 16 else None}
    pointers |= dict.fromkeys(("out_ptr", "w_ptr", "y_ptr"), "*bf16")
    args = pointers | dict.fromkeys(("num_splits", "num_columns", "stride_wh", "stride_wn"), "i32")
    args |= {"LATENT": 512, "SPLIT_LEN": rule.length, "FEW_SPLITS": rule.few, "PDL": True}
    if rows == 1:
        args |= {"HEADS": heads, "BLOCK_N": 32, "CHUNK": 8}
        assert compile_ahead(_value_rows_kernel, 90, args, num_warps=4)
    else:
        args |= {"num_sequences": "i32", "num_heads": "i32", "BLOCK_M": rows, "BLOCK_N": 128, "CHUNK": 4}
        assert compile_ahead(_values_kernel, 90, args, num_warps=8)
