"""Norms, rotation and store along with decode attention on Hopper: the bits of the separate launches.

On a CPU its machine code is put to the same test in test_on_ptx.py.
"""

from __future__ import annotations

import pytest
import torch

from kernels.attention_decode_rows import _STAGES, _decode_rows_kernel, stores_new
from kernels.decode_cut import FEW_PROGRAMS
from kernels.kv_quantize import KVScales
from kernels.new_rows import NewRows
from kernels.turn_heads import Rope
from tests.aot import aot
from tests.gluon_aot import compile_gluon_ahead
from tests.new_rows import check_new_rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("window", [0, 1, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (32, 8), (7, 1), (15, 1)])
def test_bits_are_those_of_the_separate_launches(heads, kv_heads, window, norms, dtype):
    """Of as many rows as are taken, some without a token, one that is not stored."""
    rows = FEW_PROGRAMS // kv_heads
    for start in range(0, 24, 8):
        lens = [*(1 + 97 * b % 2300 for b in range(start, start + rows - 1)), 0]
        options = {"norms": norms, "interleaved": start == 8, "window": window, "rotated": 64 if start else 128}
        check_new_rows(lens, heads, kv_heads, dtype=dtype, not_stored=[0] if start else [], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize(
    "length",
    [
        1,  # the new key alone
        64, 65,  # it ends a tile, it is alone in a tile
        128, 129,  # in a split
        193, 256,
        1024, 1025,  # around longer splits, of four tiles: stages are used again
        2048, 2049, 9000,
    ],
)  # fmt: skip
def test_the_new_key_anywhere_in_a_split(length, window):
    check_new_rows([length, max(length - 1, 1)], 32, 4, window=window, not_stored=[1])


def rows_of(num_sequences, heads, kv_heads, width=128, dtype=torch.bfloat16, device="cuda"):
    """(queries, both caches) and the new rows, all zero."""
    qkv = torch.zeros(num_sequences, heads + 2 * kv_heads, width, dtype=dtype, device=device)
    q_BHC, k_BGC, v_BGC = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cache = torch.zeros(3, 2, 16, kv_heads, width, dtype=dtype, device=device)
    index_B = torch.zeros(num_sequences, dtype=torch.int64, device=device)
    rope = Rope(index_B, torch.zeros(1, width, device=device), False)
    return (q_BHC, cache[:, 0], cache[:, 1]), NewRows(k_BGC, v_BGC, None, rope, index_B)


@pytest.mark.gpu
def test_what_is_left_to_the_separate_launches():
    def taken(*shape, scales=None, **options):
        operands, new = rows_of(*shape, **options)
        return stores_new(*operands, scales, new)

    assert taken(4, 32, 4) and taken(1, 15, 1) and taken(2, 32, 8, dtype=torch.float16)
    assert not taken(5, 32, 4)  # too many programs
    assert not taken(0, 32, 4)
    assert not taken(1, 16, 1)  # no row to spare for the key
    assert not taken(1, 8, 2, width=64) and not taken(1, 8, 2, width=256)
    assert not taken(1, 8, 2, dtype=torch.float32)
    scale_NPG = torch.ones(3, 16, 2, device="cuda")
    assert not taken(1, 8, 2, scales=KVScales(scale_NPG, scale_NPG, given=False, saturated_1=None))
    operands, new = rows_of(1, 8, 2)
    shifted = torch.zeros(4, 16, 2, 136, dtype=torch.bfloat16, device="cuda")[..., 4:132]
    assert not stores_new(operands[0], shifted, shifted, None, new)  # copies of 16 bytes would be askew
    assert not stores_new(*operands, None, new._replace(k_BGC=shifted[:1, 0]))


def test_a_cpu_is_left_to_the_separate_launches():
    operands, new = rows_of(1, 8, 2, device="cpu")
    assert not stores_new(*operands, None, new)


@aot
@pytest.mark.parametrize(
    ("dtype", "norms", "group", "window", "half", "interleaved"),
    [("bf16", True, 8, 0, 64, False), ("bf16", False, 15, 512, 64, True), ("fp16", True, 7, 512, 32, False)],
)
def test_kernel_compiles_ahead_of_time(dtype, norms, group, window, half, interleaved):
    rows = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "new_k_ptr", "new_v_ptr")
    args: dict[str, object] = dict.fromkeys(rows, f"*{dtype}")
    args |= dict.fromkeys(("q_weight_ptr", "k_weight_ptr"), f"*{dtype}" if norms else None)
    args |= dict.fromkeys(("acc_ptr", "sums_ptr", "angles_ptr"), "*fp32")
    args |= dict.fromkeys(("tables_ptr", "kv_lens_ptr"), "*i32") | dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64")
    args |= {"eps": "fp32", "scale_log2": "fp32", "num_heads": "i32"}
    names = ("qb", "qh", "nkb", "nkg", "nvb", "nvg", "kn", "kp", "kg", "vn", "vp", "vg", "tb", "sum")
    args |= {f"stride_{name}": "i32" for name in names}
    args |= {"GROUP": group, "PAGE": 16, "WINDOW": window, "SPLIT_LEN": 128, "FEW_SPLITS": 8}
    args |= {"HALF": half, "INTERLEAVED": interleaved, "STAGES": _STAGES, "PDL": True}
    compile_gluon_ahead(_decode_rows_kernel, args)
