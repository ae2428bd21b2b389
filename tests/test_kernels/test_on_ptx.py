"""Kernels for Hopper, run without one: their PTX on a machine that objects to races and to bounds (tests/ptx).

Sizes are tiny: it is the paths that count. Where the machine adds in the card's order, bits are those of a product made
in the same steps by torch.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.attention_prefill import attention_prefill
from kernels.combine import combine_norm_triton
from kernels.experts_few import SharedExperts, experts_few, experts_few_undecided, serves_undecided, takes_along
from kernels.experts_few_fp8 import experts_few_fp8
from kernels.gate_few import Undecided, gate_and_pack_triton, leave_open
from kernels.grouped_gemm import grouped_gemm_triton
from kernels.grouped_gemm_fp8 import (
    grouped_gemm_fp8_reference,
    grouped_gemm_swiglu_fp8,
    grouped_gemm_swiglu_quantized,
)
from kernels.grouped_gemm_fp8_resident import ResidentTile, launch_fp8_resident
from kernels.grouped_gemm_fp8_specialized import SpecializedTile, launch_fp8_specialized
from kernels.grouped_gemm_fp8_swiglu import launch_swiglu_quantized
from kernels.grouped_gemm_specialized import launch_specialized
from kernels.grouped_gemm_swapped import launch_swapped
from kernels.linear import head_linear, linear_triton
from kernels.mla_decode import mla_decode_reference
from kernels.mla_decode_hopper import list_rule, mla_decode_hopper, runs_on_hopper
from kernels.mla_merge import merge_parts
from kernels.mla_order import list_pieces
from kernels.mla_values import values_of_splits
from kernels.pack import pack
from kernels.quantize import dequantize_rows, quantize_rows
from kernels.routing import RoutingRule
from kernels.tiles import TileConfig
from tests.aot import aot
from tests.compare import assert_same_bits, filled_memory, max_rel
from tests.fp8_operands import draw_blocks, draw_rows, offsets_of
from tests.new_rows import check_new_rows
from tests.paged_cache import paged_cache
from tests.ptx.launch import Hopper
from tests.test_kernels.test_combine import draw as unordered_rows
from tests.test_kernels.test_combine import norm_operands
from tests.test_kernels.test_combine_at_once import rows_in_order
from tests.test_kernels.test_latent_rope_store import check_against_separate
from tests.test_kernels.test_latent_rope_store import operands as latents
from tests.test_kernels.test_mla_values import drawn_splits

pytestmark = aot


@pytest.fixture(scope="module")
def hopper() -> Hopper:
    return Hopper()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(shape[-1] ** -0.5).bfloat16()


def rows_of(num_rows: int, width: int, seed: int = 0) -> Tensor:
    """A view into longer, wider rows, which are NaN."""
    wide = torch.full((num_rows + 1, width + 8), torch.nan, dtype=torch.bfloat16)
    wide[:num_rows, :width] = drawn(num_rows, width, seed=seed) * width**0.5
    return wide[:num_rows, :width]


def in_steps(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x w', fp32, as the tensor core adds: 16 entries of K after the 16 before."""
    acc_MN = torch.zeros(x_MK.shape[0], w_NK.shape[0])
    for x, w in zip(x_MK.double().split(16, 1), w_NK.double().split(16, 1)):
        acc_MN = (acc_MN.double() + x @ w.T).float()
    return acc_MN


def gated(x_MK: Tensor, w_2FK: Tensor) -> Tensor:
    gate, up = in_steps(x_MK, w_2FK).chunk(2, 1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x_MK.dtype)


def slots_of(offsets_S1: Tensor) -> list[slice]:
    ends = offsets_S1.tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


@pytest.mark.parametrize(
    ("columns", "width", "kernel"),
    [
        (40, 264, "few_rows_kernel"),
        (77, 8, "few_rows_kernel"),
        (150, 1032, "few_rows_kernel"),  # 64 rows a program, in all of its stages
        (150, 1544, "few_rows_deep_kernel"),  # stages are filled again
        (90, 2312, "few_rows_deep_kernel"),  # of 32 rows
    ],
)
def test_linear_of_few_rows(hopper, columns, width, kernel):
    wide_w = torch.full((columns + 3, width + 8), torch.nan, dtype=torch.bfloat16)
    wide_w[:columns, :width] = drawn(columns, width, seed=1)
    x_MK, bias_N = rows_of(3, width), drawn(columns, seed=2)
    with hopper.posing(), filled_memory():
        y_MN = linear_triton(x_MK, wide_w[:columns, :width], bias_N)
    assert hopper.launches[-1] == kernel
    assert_same_bits(y_MN, (in_steps(x_MK, wide_w[:columns, :width]) + bias_N.float()).bfloat16())


@pytest.mark.parametrize(
    ("hidden", "along", "ids"),
    [
        pytest.param(72, False, [[3, 0], [-1, -1], [0, 1]], id="alone"),
        pytest.param(72, True, [[3, 0], [-1, -1], [0, 1]], id="with shared experts"),
        pytest.param(1544, True, [[3, 0]], id="one token, whose h comes in parts"),
    ],
)
def test_experts_of_few_tokens(hopper, hidden, along, ids):
    """A slot without rows; a token that goes nowhere."""
    num_slots, width, num_tokens, num_rows = 4, 264, len(ids), 2 * len(ids)
    w13_S2FD, w2_SDF = drawn(num_slots, 2 * hidden, width, seed=1), drawn(num_slots, width, hidden, seed=2)
    shared = SharedExperts(drawn(400, width, seed=3), drawn(width, 200, seed=4)) if along else None
    ids_TK = torch.tensor(ids, dtype=torch.int32)
    x_TD = rows_of(num_tokens, width)
    with hopper.posing(), filled_memory():
        packed = pack(ids_TK, torch.arange(num_slots, dtype=torch.int32), num_slots)
        assert packed.counters is not None
        assert shared is None or takes_along(x_TD, w13_S2FD, w2_SDF, num_rows, shared)
        given = (x_TD, w13_S2FD, w2_SDF, packed.offsets_S1, packed.row_token_R, num_rows, packed.counters)
        ours = experts_few(*given, shared)
    for slot, rows in enumerate(slots_of(packed.offsets_S1)):
        h = gated(x_TD[packed.row_token_R[rows].long()], w13_S2FD[slot])
        assert_same_bits(ours.y_RD[rows], in_steps(h, w2_SDF[slot]).bfloat16())
    assert bool(ours.y_RD[4:].isnan().all())  # rows of no slot are not written
    if shared is not None:
        assert ours.shared_TD is not None
        wanted_TD = in_steps(gated(x_TD, shared.gate_up_2FD), shared.down_DF).bfloat16()
        assert_same_bits(ours.shared_TD, wanted_TD)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "along", "multiprocessors"),
    [
        pytest.param(3, 72, True, 3, id="three rows"),
        pytest.param(1, 72, False, 3, id="one row"),
        pytest.param(1, 1544, True, 16, id="one row, whose h comes in parts, many programs for its pieces"),
    ],
)
def test_experts_of_few_tokens_that_it_chooses(num_tokens, hidden, along, multiprocessors):
    hopper = Hopper(multiprocessors=multiprocessors)
    num_experts, width, rule = 5, 264, RoutingRule(top_k=2)
    w13_S2FD, w2_SDF = drawn(num_experts, 2 * hidden, width, seed=1), drawn(num_experts, width, hidden, seed=2)
    x_TD, gate_ED = rows_of(num_tokens, width), drawn(num_experts, width, seed=5)
    slot_of_E = torch.tensor([4, -1, 0, 2, 1], dtype=torch.int32)
    shared = SharedExperts(drawn(144, width, seed=3), drawn(width, 72, seed=4)) if along else None
    with hopper.posing(), filled_memory():
        assert serves_undecided(x_TD, w13_S2FD, w2_SDF, num_experts, rule)
        routed = leave_open(x_TD, None, None, gate_ED, None, rule, slot_of_E, num_experts, real_T=None)
        assert isinstance(routed.packed, Undecided)
        ours = experts_few_undecided(x_TD, w13_S2FD, w2_SDF, routed.packed, shared)
    scores_TE = (x_TD.double() @ gate_ED.double().T).softmax(-1)
    top = scores_TE.topk(2)
    ids_TK, weights_TK = routed.packed.routing.expert_ids_TK, routed.packed.routing.weights_TK
    assert torch.equal(ids_TK, top.indices.int())
    assert max_rel(weights_TK, top.values / top.values.sum(-1, keepdim=True)) < 1e-5
    y_TKD = ours.y_RD.view(num_tokens, 2, width)
    for t in range(num_tokens):
        for k in range(2):
            slot = int(slot_of_E[ids_TK[t, k]])
            row = int(routed.packed.packed.packed_row_TK[t, k])
            assert row == (2 * t + k if slot >= 0 else -1)
            if slot >= 0:
                wanted_D = in_steps(gated(x_TD[t : t + 1], w13_S2FD[slot]), w2_SDF[slot]).bfloat16()[0]
                assert_same_bits(y_TKD[t, k], wanted_D)
    if shared is not None:
        assert ours.shared_TD is not None
        assert_same_bits(ours.shared_TD, in_steps(gated(x_TD, shared.gate_up_2FD), shared.down_DF).bfloat16())


@pytest.mark.parametrize("apart", [1.0, 60.0], ids=["near scores", "scores near the least numbers"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_choice_there_is_the_router_s(hopper, num_tokens, apart):
    """The bits of its weights, too, however scores are divided. The router decides row by row."""
    num_experts, rule = 40, RoutingRule(top_k=4, renormalize=False)
    w13_S2FD, w2_SDF = drawn(num_experts, 16, 64, seed=1), drawn(num_experts, 64, 8, seed=2)
    x_TD, gate_ED = rows_of(num_tokens, 64), drawn(num_experts, 64, seed=5) * apart
    router = (gate_ED, None, rule, torch.arange(num_experts, dtype=torch.int32), num_experts)
    with hopper.posing(), filled_memory():
        counter_1 = torch.zeros(1, dtype=torch.int32)
        wanted = [gate_and_pack_triton(x_1D, *router, counter_1=counter_1)[0] for x_1D in x_TD.split(1)]
        undecided = leave_open(x_TD, None, None, *router).packed
        assert isinstance(undecided, Undecided)
        experts_few_undecided(x_TD, w13_S2FD, w2_SDF, undecided)
    assert torch.equal(undecided.routing.expert_ids_TK, torch.cat([each.expert_ids_TK for each in wanted]))
    assert_same_bits(undecided.routing.weights_TK, torch.cat([each.weights_TK for each in wanted]))


@pytest.mark.parametrize(("width", "shared"), [(1024, True), (1040, False)])
@pytest.mark.parametrize("make", [rows_in_order, unordered_rows], ids=["in order", "anywhere"])
def test_sum_of_few_rows(hopper, make, width, shared):
    """The bits of the kernel for many, which takes a view into wider rows, too."""
    y_RD, rows_TK, weights_TK = make(2, 3, width + 8, torch.bfloat16, "cpu")
    after = norm_operands(2, width, torch.bfloat16, "cpu", shared=shared)
    sums = []
    with hopper.posing(), filled_memory():
        for x_RD in (y_RD[:, :width], y_RD[:, :width].contiguous()):
            operands = (x_RD, rows_TK, weights_TK, *after)
            sums.append(combine_norm_triton(*operands, in_order=make is rows_in_order))
    assert hopper.launches[-2:] == ["_combine_norm_kernel", "_combine_at_once_kernel"]
    for wanted_TD, ours_TD in zip(*sums):
        assert_same_bits(ours_TD, wanted_TD)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("num_tokens", "rotated"), [(5, 64), (195, 16)], ids=["few", "many rows a program"])
def test_store_of_latents(hopper, num_tokens, rotated, interleaved):
    """The bits of norm, rotation and store by their own kernels."""
    q_THC, args = latents(num_tokens, 3, 512, rotated, torch.bfloat16, "cpu", interleaved=interleaved)
    with hopper.posing(), filled_memory():
        check_against_separate(q_THC, args, rotated)
    assert hopper.launches[-1] == "_latent_rope_store_kernel"


@pytest.mark.parametrize("heads", [3, 70], ids=["keys are rows", "heads are, in two tiles"])
def test_latent_attention(hopper, heads):
    """Where there is a list, taken twice: its counter is left at zero. One row under a wider bound: a program of three
    finds no piece."""
    lens = [70, 0, 130, 1]
    cache = paged_cache(lens, page=64, width=576, dtype=torch.bfloat16)
    q_BHX = drawn(len(lens), heads, 576, seed=7) * 24
    cache_NPX = cache.k_cache_NPGC[:, :, 0].contiguous()
    operands = (q_BHX[..., :512], q_BHX[..., 512:], cache_NPX, cache.block_tables_BM, cache.kv_lens_B)
    bounds = {"scale": 0.05, "max_kv_len": 130}
    expected = mla_decode_reference(*operands, **bounds)
    with hopper.posing(), filled_memory():
        rule = list_rule(*operands[:3])
        assert runs_on_hopper(*operands[:3]) and (rule is not None) == (heads > 32)
        pieces = None if rule is None else list_pieces(cache.kv_lens_B, rule, max_kv_len=130)
        ours = [mla_decode_hopper(*operands, **bounds, pieces=each) for each in (None, pieces, pieces)]
        row = (*(x[:1] for x in operands[:2]), cache_NPX, *(x[:1] for x in operands[3:]))
        alone = mla_decode_hopper(*row, scale=0.05, max_kv_len=8192)
    assert max_rel(ours[0], expected) < 1e-2
    for other in ours[1:]:
        assert_same_bits(other, ours[0])
    assert_same_bits(alone, ours[0][:1])
    assert pieces is None or pieces.counts[:2].tolist() == [4, 0]


@pytest.mark.parametrize("some_whole", [False, True])
@pytest.mark.parametrize(
    ("lens", "kernel"),
    [([600, 0, 129, 5000, 1], "_value_rows_kernel"), ([1 + 97 * b % 1000 for b in range(9)], "_values_kernel")],
    ids=["more splits than come at once", "more than eight sequences"],
)
def test_values_of_splits(hopper, lens, kernel, some_whole):
    """The bits of merge and product apart, of weights within wider ones and an odd number of columns."""
    whole = [int(some_whole and b % 4 == 3) for b in range(len(lens))]
    splits = drawn_splits(lens, whole, 3, 64, torch.bfloat16, "cpu")
    splits = splits if some_whole else splits._replace(whole_B=None)
    kv_lens_B, w_HVL = torch.tensor(lens, dtype=torch.int32), drawn(3, 8 + 70, 64, seed=3)[:, 8:]
    with hopper.posing(), filled_memory():
        ours = values_of_splits(splits, kv_lens_B, w_HVL)
        assert hopper.launches[-1] == kernel
        merge_parts(splits, kv_lens_B)
        wanted = head_linear(splits.out_BHL, w_HVL)
    assert not wanted.isnan().any()
    assert_same_bits(ours, wanted)


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "options"),
    [
        ([70, 0, 129, 1], 6, 2, {"rotated": 64}),  # the new key behind others, alone in a split, alone
        ([70, 193, 40], 7, 1, {"window": 66, "interleaved": True, "norms": False, "not_stored": [2]}),
        ([65, 1, 130], 3, 1, {"window": 1}),
        ([600, 1400], 15, 1, {}),  # a whole tile of queries; splits of more tiles than there are stages
    ],
    ids=["lengths", "window", "window of one", "many queries"],
)
def test_attention_that_stores_new_rows(hopper, lens, heads, kv_heads, options):
    """Against the two launches in its place, run here too."""
    first = len(hopper.launches)
    with hopper.posing(), filled_memory():
        check_new_rows(lens, heads, kv_heads, **options)
    apart, along = ["_qk_rope_store_kernel", "_decode_kernel"], ["_decode_rows_kernel"]
    assert hopper.launches[first:] == [*apart, "_merge_runs_kernel", *along, "_merge_runs_kernel"]


@pytest.mark.parametrize(("kv_heads", "width", "value_width"), [(2, 64, 64), (1, 192, 128)])  # two buffers of q; one
def test_attention_of_prompts(hopper, kv_heads, width, value_width):
    """Whole tiles of keys: in others both groups write the same zeros over what the other may be reading, which the
    machine cannot tell from a fault."""
    ends, lens, heads = [256, 128, 0], [60, 128, 0], 4
    sizes = {"page": 16, "kv_heads": kv_heads, "width": width, "value_width": value_width}
    cache = paged_cache(ends, **sizes, dtype=torch.bfloat16)
    q_THC = drawn(sum(lens), heads, width, seed=9) * width**0.5
    offsets_B = torch.tensor([end - length for end, length in zip(ends, lens)], dtype=torch.int32)
    given = (cache.k_cache_NPGC, cache.v_cache_NPGV, cache.block_tables_BM, offsets_of(lens, "cpu"), offsets_B)
    options = {"scale": width**-0.5, "max_query_len": 128, "max_kv_len": 256, "return_lse": True}
    wanted_THV, wanted_TH = attention_prefill(q_THC, *given, cache.kv_lens_B, **options)
    with hopper.posing(), filled_memory():
        out_THV, lse_TH = attention_prefill(q_THC, *given, cache.kv_lens_B, **options)
    assert hopper.launches[-1] == "_prefill_kernel"
    assert max_rel(out_THV, wanted_THV) < 1e-2 and max_rel(lse_TH, wanted_TH) < 1e-3


def grouped_operands(counts: list[int], width: int, columns: int, products: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, w, offsets), with NaN in the slots without rows and behind the last row."""
    w = drawn(len(counts), products * columns, width, seed=1)
    w[torch.tensor(counts) == 0] = torch.nan
    return rows_of(sum(counts) + 2, width), w, offsets_of(counts, "cpu")


@pytest.mark.parametrize(
    ("launch", "tile", "counts", "swiglu", "gathered"),
    [
        (launch_specialized, TileConfig(128, 128, 64, 4, 4, "specialized"), [3, 0, 130], True, True),
        (launch_specialized, TileConfig(128, 128, 64, 4, 4, "specialized"), [3, 0, 66], False, False),
        (launch_swapped, TileConfig(128, 128, 64, 4, 4, "swapped"), [3, 0, 70], True, True),
        (launch_swapped, TileConfig(128, 256, 64, 4, 4, "swapped"), [90, 0, 2], False, False),
    ],
    ids=["specialized-first", "specialized-second", "swapped-first", "swapped-second"],
)
def test_grouped_product(hopper, launch, tile, counts, swiglu, gathered):
    width, columns = 136, 72
    x_XD, w_SND, offsets_S1 = grouped_operands(counts, width, columns, 1 + swiglu)
    index_R = torch.arange(sum(counts)).flip(0).int() if gathered else None
    y_RN = torch.full((sum(counts) + 1, columns), torch.nan, dtype=torch.bfloat16)
    with hopper.posing(), filled_memory():
        launch(x_XD, w_SND, offsets_S1, index_R, y_RN, tile, swiglu=swiglu, group_m=8)
    for slot, rows in enumerate(slots_of(offsets_S1)):
        x = x_XD[rows if index_R is None else index_R[rows].long()]
        wanted = gated(x, w_SND[slot]) if swiglu else in_steps(x, w_SND[slot]).bfloat16()
        if swiglu:  # exp2 of a product here, exp there
            assert max_rel(y_RN[rows], wanted) < 2**-8
        else:
            assert_same_bits(y_RN[rows], wanted)
    assert bool(y_RN[sum(counts) :].isnan().all())


def test_grouped_product_by_pointers(hopper):
    """The tensor core's older instruction, and ordinary copies."""
    counts, width, columns = [3, 0, 20], 136, 72
    x_XD, w_SND, offsets_S1 = grouped_operands(counts, width, columns, 1)
    with hopper.posing(), filled_memory():
        y_RN = grouped_gemm_triton(x_XD, w_SND, offsets_S1, num_rows=sum(counts), tile=TileConfig(16, 64, 64, 4, 3))
    for slot, rows in enumerate(slots_of(offsets_S1)):
        assert_same_bits(y_RN[rows], in_steps(x_XD[rows], w_SND[slot]).bfloat16())


def test_grouped_product_of_fp8(hopper):
    """Groups of four warps, each with rows and without; the last block of K is in part beside the tensor."""
    counts, width, columns = [3, 0, 70], 272, 144
    for parts in (1, 2):
        x, w = draw_rows(sum(counts), width, "cpu"), draw_blocks(3, parts, columns, width, "cpu")
        offsets_S1 = offsets_of(counts, "cpu")
        y_RN = torch.full((sum(counts), columns), torch.nan, dtype=torch.bfloat16)
        with hopper.posing(), filled_memory():
            launch_fp8_specialized(x, w, offsets_S1, y_RN, SpecializedTile(2, 4))
        given = {"num_rows": sum(counts), "out_dtype": torch.bfloat16}
        assert max_rel(y_RN, grouped_gemm_fp8_reference(x, w, offsets_S1, **given)) < 2**-8


def test_grouped_product_of_fp8_with_resident_weights(hopper):
    counts, width, columns = [3, 0, 200], 272, 144
    x, w = draw_rows(sum(counts), width, "cpu"), draw_blocks(3, 1, columns, width, "cpu")
    offsets_S1 = offsets_of(counts, "cpu")
    y_RN = torch.full((sum(counts), columns), torch.nan, dtype=torch.bfloat16)
    with hopper.posing(), filled_memory():
        launch_fp8_resident(x, w, offsets_S1, y_RN, ResidentTile(3, 4))
    wanted = grouped_gemm_fp8_reference(x, w, offsets_S1, num_rows=sum(counts), out_dtype=torch.bfloat16)
    assert max_rel(y_RN, wanted) < 2**-8


@pytest.mark.parametrize("gathered", [False, True])
def test_first_product_of_fp8_quantized(hopper, gathered):
    counts, width, columns = [3, 0, 140], 144, 128
    x, w = draw_rows(sum(counts), width, "cpu"), draw_blocks(3, 2, columns, width, "cpu")
    index_R = torch.arange(sum(counts)).flip(0).int() if gathered else None
    with hopper.posing(), filled_memory():
        ours = launch_swiglu_quantized(x, w, offsets_of(counts, "cpu"), index_R, sum(counts), torch.bfloat16)
    given = (x, w, offsets_of(counts, "cpu"))
    wanted = grouped_gemm_swiglu_quantized(*given, row_index_R=index_R, num_rows=sum(counts), dtype=torch.bfloat16)
    assert max_rel(ours.scales, wanted.scales) < 2**-7
    assert max_rel(dequantize_rows(ours), dequantize_rows(wanted)) < 2**-4  # a step of e4m3, here and there


def test_experts_of_few_tokens_in_fp8(hopper):
    num_slots, width, hidden, num_tokens = 4, 272, 144, 3
    w13, w2 = draw_blocks(num_slots, 2, hidden, width, "cpu"), draw_blocks(num_slots, 1, width, hidden, "cpu", seed=2)
    ids_TK, x_TD = torch.tensor([[3, 0], [-1, -1], [0, 1]], dtype=torch.int32), rows_of(num_tokens, width)
    with hopper.posing(), filled_memory():
        packed = pack(ids_TK, torch.arange(num_slots, dtype=torch.int32), num_slots)
        assert packed.counters is not None
        given = (packed.offsets_S1, packed.row_token_R, 6, packed.counters)
        y_RD = experts_few_fp8(x_TD, w13, w2, *given)
    offsets_S1, index_R = packed.offsets_S1, packed.row_token_R
    index_R[4:] = 0
    options = {"num_rows": 6, "out_dtype": torch.bfloat16}
    h_RF = grouped_gemm_swiglu_fp8(quantize_rows(x_TD), w13, offsets_S1, row_index_R=index_R, **options)
    wanted_RD = grouped_gemm_fp8_reference(quantize_rows(h_RF), w2, offsets_S1, **options)
    assert max_rel(y_RD[:4], wanted_RD[:4]) < 2e-2
    assert bool(y_RD[4:].isnan().all())
