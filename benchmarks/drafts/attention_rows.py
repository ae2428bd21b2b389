"""Decode attention of few rows, its keys and values in shared memory ahead of the wait (kernels/attention_decode.py).
Predicted: qwen3 -1.2 to -2.0 us a layer at one row (-60 to -95 us a step of 2,246), of 5.7 us.

Today's chain with `new`, from the wait to the first product, in sm_90 machine code: the queries (a round of L2), their
norm, then their pairs' other halves (L1), six barriers that bring weights, cosines and sines into the queries' layout,
then only the new key and value (a round of L2), its norm, halves and two barriers more, its store to the cache, a
barrier, and only then the copies of keys and values to shared memory (64 KB a program, a round of L2 and 0.55 us at 64
bytes a cycle): three rounds, some 990 instructions a warp, 12 barriers.
Here every older key and value is copied ahead of the wait: they are older than the launch before. Behind it queries,
the new key, both with their pairs' other halves, and the value are asked for at once; the key is one more row of the
queries' tile (which has 16, of which a model uses 8), so its norm and turn cost nothing of their own. No copy waits for
it: its score is a product with its own row, and its value takes its place in registers, in the program of the last
split alone. One round, 570 instructions, two barriers: -0.3 to -0.6 us for the new key's round, -0.8 for the copies
(they were asked into L2 before), -0.2 for instructions, -0.2 for barriers. Behind that the sum of weights is taken
behind the products, on whose way nothing waits for it: some 0.1 us a tile.

The products, tiles, sums and roundings are the same, in the same layouts, so the same bits (a column of scores does not
depend on its neighbours; q's norm has the threads of `norm_tile`). It takes 104 KB of shared memory where it was 72;
beside the output map's 165 KB there is room for neither.

To land it: kernels/attention_decode_rows.py, taken by `attention_decode_triton` where `serves`; `new` then leaves
_decode_kernel, ask_for_keys and store_new go. FEW_PROGRAMS = 4 was measured with the old chain: try 8 (mixtral's row)
and 16. Test: what test_attention_decode.py has for `new`, with NaN in the new key's place in the cache, windows of 1
and such as begin within a tile, a row of slot -1, and lengths of one key, a tile, a split and one more.
Next, if it is as good as this: the second tile's scores before the first's softmax, and maxima over warps with one
barrier for two (their order changes no bit).
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafts._attention_rows_kernel import WIDTH, attention_rows_kernel
from benchmarks.drafts.case import Case
from kernels import attention_decode as in_use
from kernels.checks import cdiv
from kernels.decode_cut import SPLITS, most_parts, takes_runs
from kernels.dependent_launch import dependent_launch
from kernels.new_rows import NewRows
from kernels.qk_rope_store import qk_rope_store
from kernels.split_kv import SplitRule
from kernels.split_runs import Parts
from kernels.tiles import device_generation
from kernels.turn_heads import HeadNorms, Rope
from launch.replay import rotation_length

_attention_decode_triton = in_use.attention_decode_triton  # what it falls back to, also when installed

_STAGES = 3
"""Tiles of 64 keys, 32 KiB each: splits of up to 1024 keys have two tiles."""


def serves(q_BHC: Tensor, k_cache_NPGC: Tensor, v_cache_NPGV: Tensor, new: NewRows) -> bool:
    """Whether the kernel takes them: 16 bits, heads of 128, a row to spare in the tile of a kv head's queries, copies
    of 16 bytes."""
    strides = (*k_cache_NPGC.stride()[:3], *v_cache_NPGV.stride()[:3])
    rows = (q_BHC, new.k_BGC, new.v_BGC)
    return (
        device_generation(q_BHC) == 9
        and q_BHC.element_size() == k_cache_NPGC.element_size() == 2
        and q_BHC.shape[2] == v_cache_NPGV.shape[3] == WIDTH.value
        and q_BHC.shape[1] // k_cache_NPGC.shape[2] < 16
        and all(stride % 16 == 0 for stride in (*strides, *(s for x in rows for s in x.stride()[:2])))
        and all(x.data_ptr() % 16 == 0 for x in (*rows, k_cache_NPGC, v_cache_NPGV))
    )


def attention_decode_triton(
    q_BHC: Tensor,
    k_cache_NPGC: Tensor,
    v_cache_NPGV: Tensor,
    block_tables_BM: Tensor,
    kv_lens_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    max_kv_len: int,
    scales: Any = None,
    whole: bool | None = None,
    rule: SplitRule = SPLITS,
    new: NewRows | None = None,
) -> Tensor:
    """As in kernels/attention_decode.py."""
    operands = (q_BHC, k_cache_NPGC, v_cache_NPGV, block_tables_BM, kv_lens_B)
    num_sequences, num_heads, width = q_BHC.shape
    num_kv_heads = k_cache_NPGC.shape[2]
    if whole is None:
        whole = takes_runs(num_sequences * num_kv_heads, max_kv_len, rule)
    nothing = num_sequences == 0 or max_kv_len == 0
    if new is None or whole or nothing or scales is not None or not serves(q_BHC, k_cache_NPGC, v_cache_NPGV, new):
        options: dict[str, Any] = {"scales": scales, "whole": whole, "rule": rule, "new": new}
        return _attention_decode_triton(*operands, scale=scale, window=window, max_kv_len=max_kv_len, **options)
    in_use._check_operands(*operands, None)
    number = most_parts(max_kv_len, window, rule, whole=False)
    out_BHV = torch.empty(num_sequences, num_heads, width, dtype=q_BHC.dtype, device=q_BHC.device)
    parts = Parts.of(num_sequences, number, num_heads, width, q_BHC.device)
    k_BGC, v_BGC, norms, rope, slots_B = new
    q_C, k_C, eps = norms or (None, None, 0.0)
    attention_rows_kernel[(num_kv_heads, number, num_sequences)](
        *operands,
        out_BHV,
        *parts,
        k_BGC,
        v_BGC,
        q_C,
        k_C,
        rope.cos_sin_PR,
        rope.positions_T,
        slots_B,
        eps,
        scale * log2(e),
        num_heads,
        *q_BHC.stride()[:2],
        *k_BGC.stride()[:2],
        *v_BGC.stride()[:2],
        *k_cache_NPGC.stride()[:3],
        *v_cache_NPGV.stride()[:3],
        block_tables_BM.stride(0),
        parts.sums_2BPH.stride(0),
        GROUP=num_heads // num_kv_heads,
        PAGE=k_cache_NPGC.shape[1],
        WINDOW=window,
        SPLIT_LEN=rule.length,
        FEW_SPLITS=rule.few,
        HALF=rope.cos_sin_PR.shape[1] // 2,
        INTERLEAVED=rope.interleaved,
        STAGES=_STAGES,
        num_warps=4,
        **dependent_launch(q_BHC),
    )
    if number > 1:
        in_use.merge_runs(parts, kv_lens_B, out_BHV, rule, window=window, whole=False)
    return out_BHV


def _attend(run: Callable[..., Tensor] | None, q_BHC: Tensor, cache_N2PGC: Tensor, *rest: Any, **options: Any) -> Any:
    """(result, cache) of this launcher; None: of the references, one after another."""
    k_cache_NPGC, v_cache_NPGC = cache_N2PGC.unbind(1)
    new: NewRows = options.pop("new")
    if run is not None:
        return run(q_BHC, k_cache_NPGC, v_cache_NPGC, *rest, new=new, **options), cache_N2PGC
    rows = (new.k_BGC, new.v_BGC, new.norms, new.rope, k_cache_NPGC, v_cache_NPGC, new.slots_B)
    q_BHC = qk_rope_store(q_BHC, *rows, None)
    return in_use.attention_decode(q_BHC, k_cache_NPGC, v_cache_NPGC, *rest, **options), cache_N2PGC


def cases(device: torch.device) -> Iterator[Case]:
    """qwen3's one row, the new key alone in the last split's second tile, alone in the last split, and behind splits of
    eight tiles; a row that is not stored, a window, half a head turned; a window that sees the new key alone; no norms,
    pairs side by side, 15 queries a key."""
    shapes = [
        ("qwen3 1 row, 577 keys", [577], 32, 4, 0, 128, False, True),
        ("qwen3 1 row, 641 keys", [641], 32, 4, 0, 128, False, True),
        ("qwen3 1 row, 4000 keys", [4000], 32, 4, 0, 128, False, True),
        ("4 rows of 1 to 900 keys, window 300", [1, 128, 129, 900], 7, 1, 300, 64, False, True),
        ("3 rows of 1 to 200 keys, window 1", [1, 70, 200], 7, 1, 1, 128, False, True),
        ("2 rows, no norms, pairs side by side, 15 heads", [200, 1500], 30, 2, 0, 128, True, False),
    ]
    cuda = device.type == "cuda"
    runs = {"in use": _attention_decode_triton, "ahead": attention_decode_triton}
    for name, lens, heads, kv_heads, *rest in shapes if cuda else shapes[3:]:
        rotation = rotation_length(512 * sum(lens) * kv_heads, most=96) if cuda else 1
        # The cache is written: each form has its own.
        forms = {
            form: [_call(run if cuda else None, lens, heads, kv_heads, *rest, device, seed) for seed in range(rotation)]
            for form, run in runs.items()
        }
        yield Case(name, forms)


def _call(
    run: Callable[..., Tensor] | None, lens: list[int], num_heads: int, num_kv_heads: int, window: int, turned: int,
    interleaved: bool, normed: bool, device: torch.device, seed: int,
) -> Callable[[], Any]:  # fmt: skip
    """Queries, keys and values are columns of one product; pages lie anywhere; what is not written yet is NaN. Where
    there are several rows the second one's is not stored."""
    generator = torch.Generator().manual_seed(seed)
    dtype, width, page, rows = torch.bfloat16 if device.type == "cuda" else torch.float32, 128, 16, len(lens)

    drawing = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawing, device=device).to(dtype)

    most = cdiv(max(lens), page)
    order = torch.randperm(rows * most, generator=generator)
    tables_BM = order.view(rows, most).int()
    cache_N2PGC = draw(rows * most, 2, page, num_kv_heads, width)
    positions_B = torch.tensor(lens) - 1
    slots_B = tables_BM.long().gather(1, positions_B[:, None] // page)[:, 0] * page + positions_B % page
    stored_b = [b for b in range(rows) if b != 1]
    for b in stored_b:
        for key in range(lens[b] - 1, cdiv(lens[b], page) * page):
            cache_N2PGC[tables_BM[b, key // page], :, key % page] = torch.nan
    slots_B[1:2] = -1
    rows_BX = draw(rows, (num_heads + 2 * num_kv_heads) * width).view(rows, -1, width)
    q_BHC, k_BGC, v_BGC = rows_BX.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angle_PR = torch.rand(max(lens), turned // 2, generator=generator) * 6.28
    table_PR = torch.cat([angle_PR.cos(), angle_PR.sin()], dim=1).to(device)
    rope = Rope(positions_B.to(device), table_PR, interleaved)
    norms = HeadNorms(draw(width), draw(width), 1e-6) if normed else None
    new = NewRows(k_BGC, v_BGC, norms, rope, slots_B.to(device))
    lens_B = torch.tensor(lens, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"scale": width**-0.5, "window": window, "max_kv_len": max(lens), "new": new}
    return partial(_attend, run, q_BHC, cache_N2PGC, tables_BM.to(device), lens_B, **options)


def install() -> None:
    in_use.attention_decode_triton = attention_decode_triton
