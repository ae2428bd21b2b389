"""Packing: the reference against its worked example and plain loops, both kernels against the reference, exactly."""

from __future__ import annotations

import pytest
import torch

from kernels import pack as pack_module
from kernels.pack import Packed, pack, pack_counts_triton, pack_reference, pack_slots_triton
from tests.aot import ARCHS, aot, compile_ahead
from tests.compare import filled_memory
from tests.shapes import NUM_EXPERTS, NUM_TOKENS, WILD_INDEX

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpret"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
KERNELS = [pytest.param(pack_slots_triton, id="one-launch"), pytest.param(pack_counts_triton, id="four-launches")]


def int32(values, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def draw_ids(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts in each row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)


def assert_same_packing(ours: Packed, reference: Packed) -> None:
    """Equal in all that is specified."""
    used = int(reference.offsets_S1[-1])
    assert torch.equal(ours.offsets_S1.cpu(), reference.offsets_S1.cpu())
    assert torch.equal(ours.packed_row_TK.cpu(), reference.packed_row_TK.cpu())
    assert torch.equal(ours.row_token_R[:used].cpu(), reference.row_token_R[:used].cpu())
    assert all(a.dtype == torch.int32 and a.shape == b.shape for a, b in zip(ours[:3], reference[:3], strict=True))


def test_worked_example():
    """The numbers of the module's docstring."""
    packed = pack(int32([[0, 1], [2, 0], [1, 2]]), int32([1, 0, -1]), 2)
    assert packed.row_token_R[:4].tolist() == [0, 2, 0, 1]
    assert packed.packed_row_TK.tolist() == [[2, 0], [-1, 3], [1, -1]]
    assert packed.offsets_S1.tolist() == [0, 2, 4]


def test_reference_against_loops():
    """By slot, then token, then k; ids and slots out of range are nowhere."""
    ids_TK = draw_ids(50, 12, 4)
    ids_TK[3] = int32([-1, 12, WILD_INDEX, -WILD_INDEX])
    slots = [3, 0, -1, 5, 2, 1, 4, -1, 0, 6, WILD_INDEX, -WILD_INDEX]
    packed = pack_reference(ids_TK, int32(slots), 6)
    rows = []
    for slot in range(6):
        assert int(packed.offsets_S1[slot]) == len(rows)
        for t in range(50):
            rows += [(t, k) for k in range(4) if 0 <= ids_TK[t, k] < 12 and slots[int(ids_TK[t, k])] == slot]
    assert int(packed.offsets_S1[6]) == len(rows)
    assert packed.row_token_R[: len(rows)].tolist() == [t for t, _ in rows]
    expected_TK = torch.full((50, 4), -1, dtype=torch.int32)
    for row, (t, k) in enumerate(rows):
        expected_TK[t, k] = row
    assert torch.equal(packed.packed_row_TK, expected_TK)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_kernel_for_numbers_of_tokens(device, kernel, num_tokens):
    """Also: experts elsewhere, a slot without rows, ids out of range."""
    ids_TK = draw_ids(num_tokens, 7, 3)
    if num_tokens > 1:
        ids_TK[1] = int32([-1, 7, WILD_INDEX])
    slot_of_E = int32([4, -1, 0, 2, -1, 1, WILD_INDEX])
    ours = kernel(ids_TK.to(device), slot_of_E.to(device), 5)
    assert_same_packing(ours, pack_reference(ids_TK, slot_of_E, 5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
def test_C43_any_number_of_experts(device, kernel, num_experts):
    ids_TK = draw_ids(37, num_experts, min(4, num_experts))
    slot_of_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ours = kernel(ids_TK.to(device), slot_of_E.to(device), num_experts)
    assert_same_packing(ours, pack_reference(ids_TK, slot_of_E, num_experts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_experts", [1, 3, 60])
def test_C43_every_expert_chosen(device, kernel, num_experts):
    """k = E."""
    ids_TK, slot_of_E = draw_ids(9, num_experts, num_experts), torch.arange(num_experts, dtype=torch.int32)
    ours = kernel(ids_TK.to(device), slot_of_E.to(device), num_experts)
    assert_same_packing(ours, pack_reference(ids_TK, slot_of_E, num_experts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_rows_on_one_expert_and_none_here(device, kernel):
    ids_TK = torch.full((300, 1), 2, dtype=torch.int32)
    for slot_of_E, num_slots in ((int32([0, 1, 3, 2]), 4), (int32([0, 1, -1, 2]), 3)):
        ours = kernel(ids_TK.to(device), slot_of_E.to(device), num_slots)
        assert_same_packing(ours, pack_reference(ids_TK, slot_of_E, num_slots))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_wild_neighbours_are_not_read(device, kernel):
    """Ids are a strided view, and the table of slots is longer than E: nothing outside may count."""
    wide_TK = torch.full((65, 6), WILD_INDEX, dtype=torch.int32)
    wide_TK[:, :2] = draw_ids(65, 4, 2)
    table = int32([1, 0, -1, 2, WILD_INDEX, 1])
    ours = kernel(wide_TK.to(device)[:, :2], table.to(device)[:4], 3)
    assert_same_packing(ours, pack_reference(wide_TK[:, :2], table[:4], 3))


@pytest.mark.parametrize("device", DEVICES)
def test_counters_come_as_zeros(device):
    """Whatever lay there before."""
    with filled_memory():
        packed = pack_slots_triton(draw_ids(5, 4, 2).to(device), torch.arange(4, dtype=torch.int32, device=device), 4)
    assert packed.counters is not None
    assert packed.counters.tolist() == [0] * pack_module.NUM_COUNTERS.value


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(131073, 256, 8), (300_000, 512, 10), (4096, 384, 8)])
def test_large(num_tokens, num_experts, top_k):
    """More blocks than one pass of the sum takes, and as many slots as ever."""
    ids_TK = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k, dim=1).indices.to(torch.int32)
    slot_of_E = torch.randperm(num_experts, device="cuda").to(torch.int32)
    assert_same_packing(pack(ids_TK, slot_of_E, num_experts), pack_reference(ids_TK, slot_of_E, num_experts))


@aot
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    pdl: dict[str, object] = {"PDL": arch >= 90}
    sizes = {"num_rows": "i32", "num_experts": "i32", "num_slots": "i32"}
    inputs = {"ids_ptr": "*i32", "slot_of_ptr": "*i32"} | pdl
    rows = {"row_token_ptr": "*i32", "packed_row_ptr": "*i32", "TOP_K": 8}
    offsets = {"offsets_ptr": "*i32"}
    for block, num_warps in pack_module._SCANS:
        args = inputs | rows | offsets | sizes | {"BLOCK": block, "counters_ptr": "*i32"}
        assert compile_ahead(pack_module._pack_slots_kernel, arch, args, num_warps=num_warps)
    blocks = {"num_blocks": "i32", "BLOCK": 128}
    count_args = inputs | sizes | blocks | {"block_counts_ptr": "*i32", "BINS": 256}
    assert compile_ahead(pack_module._count_kernel, arch, count_args)
    sum_args = pdl | {"block_counts_ptr": "*i32", "slot_counts_ptr": "*i32", "num_blocks": "i32", "BLOCK_B": 1024}
    assert compile_ahead(pack_module._sum_blocks_kernel, arch, sum_args)
    slot_args = pdl | offsets | {"slot_counts_ptr": "*i32", "num_slots": "i32", "BINS": 256}
    assert compile_ahead(pack_module._sum_slots_kernel, arch, slot_args)
    rank_args = inputs | rows | offsets | sizes | blocks | {"block_sums_ptr": "*i32"}
    assert compile_ahead(pack_module._rank_kernel, arch, rank_args)
