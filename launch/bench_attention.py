"""w5: paged attention by CUDA graph replay: decode with grouped-query heads, decode over MLA's latent, prefill.

Knows head layouts, lengths and pages; knows nothing of networks. Sequences of one point all have the same length; their
blocks are scattered over the pool. Calls rotate over disjoint parts of a pool far larger than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.attention_decode import attention_decode
from kernels.attention_prefill import attention_prefill
from kernels.mla_decode import mla_decode
from kernels.mla_decode_hopper import list_rule
from kernels.mla_order import list_pieces
from launch.figure import Figure, baseline
from launch.replay import L2_BYTES, Call, rotation_length, time_variants
from launch.roofline import Ceilings, Work, causal_pairs

MAX_ROTATION = 256  # calls: a sequence of 512 positions is a megabyte


@dataclass(frozen=True)
class HeadLayout:
    """Query heads over key/value heads of one width, or over MLA's latent; `points` are (sequences, length)."""

    name: str
    kind: Literal["gqa", "mla", "prefill"]
    num_heads: int
    num_kv_heads: int
    width: int  # MLA: of the latent
    points: tuple[tuple[int, int], ...]
    rope: int = 0  # MLA: of the rotary key
    page_size: int = 16

    @property
    def position_bytes(self) -> int:
        """bf16, what one position keeps."""
        return 2 * (self.width + self.rope if self.kind == "mla" else 2 * self.num_kv_heads * self.width)

    @property
    def scale(self) -> float:
        return (self.width if self.kind != "mla" else 128 + self.rope) ** -0.5


_MLA_POINTS = ((1, 4096), (8, 4096), (64, 4096), (128, 4096), (256, 1024))
LAYOUTS = {
    layout.name: layout
    for layout in (
        HeadLayout(
            "gqa-qwen3",
            "gqa",
            32,
            4,
            128,
            ((1, 512), (1, 32768), (8, 4096), (64, 1024), (64, 4096), (256, 1024), (256, 4096)),
        ),
        HeadLayout("gqa-mixtral", "gqa", 32, 8, 128, ((1, 32768), (8, 4096), (64, 1024), (64, 4096), (256, 4096))),
        HeadLayout("mla-16", "mla", 16, 1, 512, _MLA_POINTS, rope=64, page_size=64),
        HeadLayout("mla-128", "mla", 128, 1, 512, _MLA_POINTS, rope=64, page_size=64),
        HeadLayout("prefill-qwen3", "prefill", 32, 4, 128, ((4, 4096), (1, 16384), (16, 512))),
        HeadLayout("tiny-gqa", "gqa", 4, 2, 16, ((2, 40),)),  # these three for a CPU
        HeadLayout("tiny-mla", "mla", 4, 1, 16, ((2, 40),), rope=8),
        HeadLayout("tiny-prefill", "prefill", 4, 2, 16, ((2, 40),)),
    )
}
LISTED = tuple(name for name in LAYOUTS if not name.startswith("tiny"))


def head_layout(name: str) -> HeadLayout:
    """A name of LAYOUTS."""
    if name not in LAYOUTS:
        raise ValueError(f"attention={name} is unknown; use {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]


def attention_work(layout: HeadLayout, num_sequences: int, length: int) -> Work:
    """Every cached position read once; scores and weighted values of every (query, key) pair. Queries are not counted.

    A decode step has one query a sequence, a prefill `length` of them, causal.
    """
    pairs = num_sequences * (causal_pairs(0, length) if layout.kind == "prefill" else length)
    per_pair = 2 * layout.width + layout.rope if layout.kind == "mla" else 2 * layout.width
    return Work(float(num_sequences * length * layout.position_bytes), 2.0 * layout.num_heads * per_pair * pairs)


class PagedPool:
    """A cache of random positions, at least L2_BYTES on a GPU, and tables of disjoint, scattered blocks over it."""

    def __init__(self, layout: HeadLayout, num_sequences: int, length: int, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.blocks_per_sequence = -(-length // layout.page_size)
        needed = num_sequences * self.blocks_per_sequence
        block_bytes = layout.position_bytes * layout.page_size
        gpu = device.type == "cuda"
        self.num_calls = rotation_length(needed * block_bytes, least=4, most=MAX_ROTATION) if gpu else 2
        # Large points read far more than the cache holds: their calls share one set of blocks.
        self.num_sets = self.num_calls if needed * block_bytes < L2_BYTES else 1
        num_blocks = needed * self.num_sets
        page = layout.page_size
        heads = (layout.num_kv_heads, layout.width)
        shape = (
            (num_blocks, page, layout.width + layout.rope) if layout.kind == "mla" else (num_blocks, 2, page, *heads)
        )
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        generator = torch.Generator().manual_seed(num_sequences * length)
        order = torch.randperm(num_blocks, generator=generator).to(torch.int32).to(device)
        self.tables_XBM = order.view(self.num_sets, num_sequences, self.blocks_per_sequence)

    def table(self, call: int) -> Tensor:
        """int32 [B, M]"""
        return self.tables_XBM[call % self.num_sets]


def attention_calls(layout: HeadLayout, num_sequences: int, length: int, device: torch.device) -> list[Call]:
    """One rotation of a point."""
    pool = PagedPool(layout, num_sequences, length, device)
    kv_lens_B = torch.full((num_sequences,), length, dtype=torch.int32, device=device)
    make: dict[str, Callable[[HeadLayout, PagedPool, Tensor, Tensor, int], Call]]
    make = {"gqa": _gqa_call, "mla": _mla_call, "prefill": _prefill_call}
    return [make[layout.kind](layout, pool, pool.table(call), kv_lens_B, length) for call in range(pool.num_calls)]


def _queries(layout: HeadLayout, num_rows: int, width: int, device: torch.device) -> Tensor:
    return torch.empty(num_rows, layout.num_heads, width, dtype=torch.bfloat16, device=device).normal_()


def _gqa_call(layout: HeadLayout, pool: PagedPool, table_BM: Tensor, kv_lens_B: Tensor, length: int) -> Call:
    q_BHC = _queries(layout, table_BM.shape[0], layout.width, pool.device)
    k_NPGC, v_NPGC = pool.cache[:, 0], pool.cache[:, 1]
    return lambda: attention_decode(q_BHC, k_NPGC, v_NPGC, table_BM, kv_lens_B, scale=layout.scale, max_kv_len=length)


def _mla_call(layout: HeadLayout, pool: PagedPool, table_BM: Tensor, kv_lens_B: Tensor, length: int) -> Call:
    q_BHL = _queries(layout, table_BM.shape[0], layout.width, pool.device)
    q_pe_BHR = _queries(layout, table_BM.shape[0], layout.rope, pool.device)
    operands = (q_BHL, q_pe_BHR, pool.cache, table_BM, kv_lens_B)
    rule = list_rule(*operands[:3])  # as in a step, the list is no layer's work
    pieces = None if rule is None else list_pieces(kv_lens_B, rule, max_kv_len=length)
    return lambda: mla_decode(*operands, scale=layout.scale, max_kv_len=length, pieces=pieces)


def _prefill_call(layout: HeadLayout, pool: PagedPool, table_BM: Tensor, kv_lens_B: Tensor, length: int) -> Call:
    num_sequences = table_BM.shape[0]
    q_THC = _queries(layout, num_sequences * length, layout.width, pool.device)
    starts_B1 = torch.arange(num_sequences + 1, dtype=torch.int32, device=pool.device) * length
    offsets_B = torch.zeros(num_sequences, dtype=torch.int32, device=pool.device)
    k_NPGC, v_NPGC = pool.cache[:, 0], pool.cache[:, 1]
    return lambda: attention_prefill(
        q_THC,
        k_NPGC,
        v_NPGC,
        table_BM,
        starts_B1,
        offsets_B,
        kv_lens_B,
        scale=layout.scale,
        max_query_len=length,
        max_kv_len=length,
    )


def measure_attention(
    layout: HeadLayout,
    device: torch.device,
    ceilings: Ceilings,
    baselines: dict[str, Any],
    *,
    seconds: float = 0.2,
    points: tuple[tuple[int, int], ...] | None = None,
) -> list[Figure]:
    """A figure for each point: microseconds of a decode, TFLOP/s of a prefill."""
    figures = []
    for num_sequences, length in points or layout.points:
        calls = attention_calls(layout, num_sequences, length, device)
        timing = time_variants({"ours": calls}, device, seconds=seconds)["ours"]
        del calls
        work = attention_work(layout, num_sequences, length)
        name = f"{num_sequences}x{length}"
        peers, target = baseline(baselines, "w5", layout.name, name)
        as_rate = layout.kind == "prefill"
        floor_s = ceilings.seconds(work)

        def in_unit(seconds: float, as_rate: bool = as_rate, work: Work = work) -> float:
            return work.flops / seconds / 1e12 if as_rate else seconds * 1e6

        figures.append(
            Figure(
                "w5",
                layout.name,
                name,
                in_unit(timing.median),
                "TFLOP/s" if as_rate else "us",
                floor=in_unit(floor_s),
                seconds=timing.median,
                bytes=work.bytes,
                flops=work.flops,
                target=target,
                peers=peers,
                samples=tuple(in_unit(sample) for sample in timing.samples),
            )
        )
    return figures
