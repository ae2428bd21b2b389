"""Fixed-shape tiles of the paged KV cache, for the attention references (the CPU's product path).

Knows pages, positions and matrix shapes; knows neither models nor requests. Its idea: a query row's result has the same
bits whatever else is in the batch and however its prompt is cut, because every product has the same shape, every tile
of keys starts at the same absolute position, and a tile that holds nothing for a row leaves that row exactly as it was.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from kernels.kv_int4 import int4_numbers


def gather_kv_tile(
    cache_NPGC: Tensor,
    block_tables_BM: Tensor,
    index_BW: Tensor,
    valid_BW: Tensor,
    scales: Tensor | None = None,
    *,
    int4: bool = False,
) -> Tensor:
    """tile_BGWC fp32: token index_BW[b, w] of sequence b for each head, as a number; zeros where not valid.

    `scales`: None, or [N, P, G], which the entries are multiplied with; `int4`: the entries are bytes of two columns,
    and scales [N, P, G, 4] (kv_int4.py). Table entries of invalid tokens are not used as addresses, and what lies in
    the cache there does not reach the tile.
    """
    where = (block_tables_BM, index_BW, valid_BW)
    rows_BGWC = _gather_rows(cache_NPGC, *where)
    if scales is None:
        tile_BGWC = rows_BGWC.float()
    elif int4:
        tile_BGWC = int4_numbers(rows_BGWC, _gather_rows(scales, *where))
    else:
        tile_BGWC = rows_BGWC.float().mul_(_gather_rows(scales.unsqueeze(-1), *where))
    if bool(valid_BW.all()):
        return tile_BGWC
    return tile_BGWC.masked_fill_(~valid_BW[:, None, :, None], 0.0)


def _gather_rows(cache_NPGC: Tensor, block_tables_BM: Tensor, index_BW: Tensor, valid_BW: Tensor) -> Tensor:
    """rows_BGWC as stored; of invalid tokens, those of the first block's first."""
    page_size, num_heads, width = cache_NPGC.shape[1:]
    index_BW = index_BW.masked_fill(~valid_BW, 0)
    block_BW = block_tables_BM.gather(1, index_BW // page_size).long().masked_fill(~valid_BW, 0)
    # The cache is looked at as rows of `width` entries that start every `step` entries (they may overlap), whatever the
    # strides of pages, tokens and heads: one row copy per token and head, straight into the order the product wants.
    strides = cache_NPGC.stride()[:3]
    step = gcd(*strides) or 1  # strides of 0: one row that stands for all
    page_stride, token_stride, head_stride = (stride // step for stride in strides)
    last_row = sum((size - 1) * (stride // step) for size, stride in zip(cache_NPGC.shape, strides))
    rows = cache_NPGC.as_strided((last_row + 1, width), (step, 1), cache_NPGC.storage_offset())
    row_BW = block_BW * page_stride + (index_BW % page_size) * token_stride
    head_G1 = torch.arange(num_heads, device=rows.device).unsqueeze(1) * head_stride
    row_BGW = row_BW.unsqueeze(1) + head_G1
    return rows.index_select(0, row_BGW.flatten()).view(*row_BGW.shape, width)


def tile_product(a_IMK: Tensor, b_IKN: Tensor) -> Tensor:
    """The product of each pair of matrices. An item's bits do not depend on the number of items.

    With fewer items than threads the library would cut one item among threads, along rows whose number then depends on
    the number of items; zero items fill up to one per thread.
    """
    missing = torch.get_num_threads() - a_IMK.shape[0] if a_IMK.device.type == "cpu" else 0
    if missing <= 0:
        return torch.bmm(a_IMK, b_IKN)
    filled_a = torch.cat([a_IMK, a_IMK.new_zeros(missing, *a_IMK.shape[1:])])
    # The second operand keeps its orientation (rows or columns together): the two give different bits.
    if b_IKN.stride(1) == 1 and b_IKN.stride(2) != 1:
        b_INK = b_IKN.transpose(1, 2)
        filled_b = torch.cat([b_INK, b_INK.new_zeros(missing, *b_INK.shape[1:])]).transpose(1, 2)
    else:
        filled_b = torch.cat([b_IKN, b_IKN.new_zeros(missing, *b_IKN.shape[1:])])
    return torch.bmm(filled_a, filled_b)[: a_IMK.shape[0]]


class OnlineSoftmax:
    """Softmax-weighted sum of values over tiles of keys, in order, in fp32: `items` blocks of `rows` queries."""

    def __init__(self, items: int, rows: int, width: int, device: torch.device) -> None:
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.max_IM = torch.full((items, rows), float("-inf"), **fp32)
        self.total_IM = torch.zeros(items, rows, **fp32)
        self.sum_IMV = torch.zeros(items, rows, width, **fp32)

    def add(self, live_I: Tensor, scores_IMW: Tensor, values_IWV: Tensor) -> None:
        """One tile for the items `live_I` (ascending, distinct). A score of -inf is no key; values there are finite."""
        whole = live_I.shape[0] == self.max_IM.shape[0]
        old_max_IM = self.max_IM if whole else self.max_IM[live_I]
        old_total_IM = self.total_IM if whole else self.total_IM[live_I]
        old_sum_IMV = self.sum_IMV if whole else self.sum_IMV[live_I]
        max_IM = torch.maximum(old_max_IM, scores_IMW.amax(-1))
        # A row without a key so far subtracts 0, so that exp(-inf) gives 0 and not NaN.
        base_IM = max_IM.masked_fill(max_IM == float("-inf"), 0.0)
        weights_IMW = (scores_IMW - base_IM.unsqueeze(-1)).exp()
        decay_IM = (old_max_IM - base_IM).exp()
        total_IM = old_total_IM * decay_IM + weights_IMW.sum(-1)
        sum_IMV = old_sum_IMV * decay_IM.unsqueeze(-1) + tile_product(weights_IMW, values_IWV)
        if whole:
            self.max_IM, self.total_IM, self.sum_IMV = max_IM, total_IM, sum_IMV
        else:
            self.max_IM[live_I], self.total_IM[live_I], self.sum_IMV[live_I] = max_IM, total_IM, sum_IMV

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_IMV, lse_IM), natural logarithm; a row without any key gives 0 and -inf."""
        empty_IM = self.total_IM == 0
        out_IMV = self.sum_IMV / self.total_IM.masked_fill(empty_IM, 1.0).unsqueeze(-1)
        return out_IMV, self.max_IM + self.total_IM.log()
