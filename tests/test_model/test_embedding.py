"""The head: logits in fp32 of unrounded sums, the same bits for a row whatever product serves its step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.linear import linear
from moe.model import embedding
from moe.model.embedding import Head
from moe.model.linear import FEW_ROWS, forbid_split_k
from tests.compare import assert_same_bits


def test_logits_are_not_rounded_and_the_cpu_keeps_the_unsplit_product() -> None:
    torch.manual_seed(0)
    head, x_BD = Head(torch.randn(70, 48).bfloat16()), torch.randn(5, 48).bfloat16()
    assert head.choose_product() == "unsplit"
    logits_BV = head(x_BD)
    exact_BV = x_BD.double() @ head.weight_VD.double().T
    assert logits_BV.dtype == torch.float32
    assert float((logits_BV.double() - exact_BV).abs().max()) < 1e-4  # rounded to bfloat16 it were 0.06
    assert_same_bits(head(x_BD[3:4]), logits_BV[3:4])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab", "width"), [(32000, 4096), (102400, 2048), (50257, 2880)])
def test_gpu_logits_keep_their_bits(vocab: int, width: int, dtype: torch.dtype) -> None:
    """Also for numbers of rows that were not tried; an odd vocabulary has rows that TMA cannot address."""
    forbid_split_k()
    torch.manual_seed(0)
    head = Head((torch.randn(vocab, width) / width**0.5).to("cuda", dtype))
    words = head.choose_product()
    assert "library" in words or dtype == torch.float32 or width == 2880, words
    x_BD = torch.randn(1040, width).to("cuda", dtype)
    whole_BV = linear(x_BD, head.weight_VD, out_dtype=torch.float32)
    for rows in (1, 11, 77, 150, 300, 700, 1040):
        assert_same_bits(head(x_BD[:rows]), whole_BV[:rows])


@pytest.mark.gpu
def test_a_library_that_splits_the_sum_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(x_BD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        half = x_BD.shape[1] // 2
        first = torch.mm(x_BD[:, :half], weight_VD[:, :half].t(), out_dtype=torch.float32)
        return first + torch.mm(x_BD[:, half:], weight_VD[:, half:].t(), out_dtype=torch.float32)

    monkeypatch.setattr(embedding, "_library", splits)
    head = Head(torch.randn(2048, 1024, device="cuda").bfloat16())
    assert head.choose_product() == "unsplit"
    x_BD = torch.randn(FEW_ROWS + 1, 1024, device="cuda").bfloat16()
    assert_same_bits(head(x_BD), linear(x_BD, head.weight_VD, out_dtype=torch.float32))
