"""Which product a linear shape uses, and that every choice keeps a row's bits."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import linear_reference
from moe.model.linear import (
    FEW_ROWS,
    MANY_ROWS,
    TRIED_ROWS,
    Linear,
    Parameters,
    forbid_split_k,
    product_of_rows,
    rows_that_differ,
)
from tests.compare import assert_same_bits, max_rel


def some_parameters(device: str, dtype: torch.dtype) -> Parameters:
    torch.manual_seed(0)
    shapes = {"a.weight": (48, 64), "b.weight": (48, 64), "c.weight": (24, 56), "c.bias": (24,), "norm.weight": (64,)}
    return Parameters({name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()})


def test_linears_are_bound_by_name() -> None:
    parameters = some_parameters("cpu", torch.float32)
    product = parameters.linear("c")
    assert product is parameters.linear("c")
    x_MK = torch.randn(5, 56)
    expected_MN = x_MK.double() @ parameters["c.weight"].double().T + parameters["c.bias"].double()
    assert max_rel(product(x_MK), expected_MN) < 1e-6
    assert parameters.linear("a").bias_N is None
    with pytest.raises(KeyError):
        parameters.linear("missing")


def test_the_cpu_never_uses_the_library() -> None:
    """torch's own rows change with their number there; the report names each distinct shape once."""
    parameters = some_parameters("cpu", torch.float32)
    for name in "abc":
        parameters.linear(name)
    assert parameters.choose_products() == {"[48, 64]": "unsplit", "[24, 56] + bias": "unsplit"}
    assert all(linear.product is linear_reference for linear in parameters.linears.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    product = Linear(torch.randn(40, 72).to(dtype), torch.randn(40).to(dtype))
    x_MK = torch.randn(129, 72).to(dtype)
    whole_MN = product(x_MK)
    for rows in (1, 2, 31, 32, 33, 100, 128):
        assert_same_bits(product(x_MK[:rows]), whole_MN[:rows])
        assert_same_bits(product(x_MK[-rows:]), whole_MN[-rows:])


def test_a_library_that_changes_its_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in library whose rows differ for one odd size only; one that never differs; one that always does."""
    weight_NK = torch.randn(8, 16)

    def steady(x_MK, w_NK, bias_N=None):
        return (x_MK[:, None, :] * w_NK).sum(dim=-1)

    def fickle(x_MK, w_NK, bias_N=None):
        return steady(x_MK, w_NK) * (1 + 1e-6 * (x_MK.shape[0] == 777))

    monkeypatch.setattr("moe.model.linear.F.linear", steady)
    assert rows_that_differ(weight_NK, None, steady) == []
    assert rows_that_differ(weight_NK, None, lambda x, w, b: steady(x, w) + 1.0) == list(TRIED_ROWS)
    monkeypatch.setattr("moe.model.linear.F.linear", fickle)
    assert rows_that_differ(weight_NK, None, steady) == [777]


def test_the_library_takes_over_above_the_last_number_of_rows_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def named(name):
        def product(x_MK, weight_NK, bias_N=None):
            calls.append((name, x_MK.shape[0]))
            return x_MK @ weight_NK.T

        return product

    monkeypatch.setattr("moe.model.linear.F.linear", named("library"))
    weight_NK = torch.randn(8, 16)
    for differing, last_unsplit in (([], FEW_ROWS), ([3, 48], FEW_ROWS), ([3, 256], 256)):
        words, product = product_of_rows(differing, named("unsplit"))
        assert words == f"unsplit to {last_unsplit} rows, library above"
        calls.clear()
        for rows in (1, last_unsplit, last_unsplit + 1):
            product(torch.randn(rows, 16), weight_NK, None)
        assert calls == [("unsplit", 1), ("unsplit", last_unsplit), ("library", last_unsplit + 1)]
    unsplit = named("unsplit")
    assert product_of_rows([8, MANY_ROWS], unsplit) == ("unsplit", unsplit)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (4096, 14336), (2112, 7168), (6144, 4096), (1536, 7168)])
def test_gpu_choice_keeps_bits_for_numbers_that_were_not_tried(n: int, k: int, dtype: torch.dtype) -> None:
    """Shapes of Mixtral and DeepSeek-V3, the first three known to be split by the library for small numbers of rows."""
    forbid_split_k()
    torch.manual_seed(0)
    parameters = Parameters({"a.weight": (torch.randn(n, k) / k**0.5).to("cuda", dtype)})
    product = parameters.linear("a")
    parameters.choose_products()
    x_MK = torch.randn(3000, k).to("cuda", dtype)
    whole_MN = product(x_MK)
    for rows in (1, 6, 11, 23, 50, 77, 150, 300, 700, 1100, 2500):
        assert_same_bits(product(x_MK[:rows]), whole_MN[:rows])
