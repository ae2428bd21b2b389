"""The sum of kernels/combine_few.py, all rows of a token at once, for any number of rows and wherever they lie.

Not measured in this way: rows that are not in order (by machine code three rounds of loads become one for K = 8, two
become one for mixtral's K = 2), and more than eight tokens, whose programs share a multiprocessor: 157 registers a
thread leave it three programs where 82 leave six, each with all of its bytes on their way.

To land it: where cases of many rows are no slower, `serves_few_rows` loses its first condition, its launch tells ahead
by `num_tokens <= AHEAD_ROWS` as here, and combine_few.py is where combine_norm goes; the kernel in combine.py is then
left with widths below 1024 or of other than 16 bits, which `combine_triton` and `rmsnorm_residual_triton` could do.
Where cases of up to eight rows are slower, it takes what is in order alone. Tests are there.
"""

# Launch options such as num_warps are no parameters of a kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.drafts.case import Case
from kernels import combine as in_use
from kernels import combine_few
from kernels.dependent_launch import AHEAD_ROWS, dependent_launch
from launch.replay import rotation_length

_serves_few_rows = in_use.serves_few_rows


def serves_rows(y_RD: Tensor, packed_row_TK: Tensor) -> bool:
    """As it serves one."""
    return _serves_few_rows(y_RD, packed_row_TK[:1])


def launch(y_RD: Tensor, packed_row_TK: Tensor, *operands: Any, in_order: bool) -> None:
    """Tells ahead as the kernel in use does: of few rows alone."""
    options = dependent_launch(y_RD, ahead=packed_row_TK.shape[0] <= AHEAD_ROWS)
    with mock.patch.object(combine_few, "dependent_launch", lambda *_, **__: options):
        combine_few.launch_few(y_RD, packed_row_TK, *operands, in_order=in_order)


def _summed(at_once: bool, *operands: Any) -> tuple[Tensor, Tensor]:
    serves = serves_rows if at_once else lambda *_: False
    with mock.patch.multiple(in_use, serves_few_rows=serves, launch_few=launch):
        return in_use.combine_norm_triton(*operands)


def cases(device: torch.device) -> Iterator[Case]:
    """Rows anywhere; a token in five has a choice elsewhere."""
    shapes = [
        ("mixtral 1 row", 1, 2, 4096, False),
        ("qwen3 1 row", 1, 8, 2048, False),
        ("qwen3 8 rows", 8, 8, 2048, False),
        ("dsv2-lite 8 rows", 8, 6, 2048, True),
        ("qwen3 64 rows", 64, 8, 2048, False),
        ("dsv2-lite 64 rows", 64, 6, 2048, True),
        ("qwen3 256 rows", 256, 8, 2048, False),
        ("mixtral 256 rows", 256, 2, 4096, False),
        ("qwen3 4096 rows", 4096, 8, 2048, False),
    ]
    cuda = device.type == "cuda"
    for name, *shape in shapes if cuda else shapes[:2]:
        rotation = rotation_length(2 * shape[0] * shape[1] * shape[2]) if cuda else 1
        operands = [_draw(*shape, device, seed) for seed in range(rotation)]
        if cuda:
            forms = {
                form: [partial(_summed, form == "at once", *x) for x in operands] for form in ("in use", "at once")
            }
        else:
            forms = {form: [partial(in_use.combine_norm, *x) for x in operands] for form in ("in use", "at once")}
        yield Case(name, forms)


def _draw(num_tokens: int, top_k: int, width: int, shared: bool, device: torch.device, seed: int) -> tuple[Any, ...]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    num_rows = num_tokens * top_k
    rows_TK = torch.randperm(num_rows, generator=generator, device=device).int().view(num_tokens, top_k)
    rows_TK[4::5, 0] = -1
    weights_TK = torch.rand(num_tokens, top_k, generator=generator, device=device)
    residual_TD, norm_D = draw(num_tokens, width), draw(width)
    shared_TD = draw(num_tokens, width) if shared else None
    return draw(num_rows, width), rows_TK, weights_TK, residual_TD, norm_D, 1e-6, shared_TD


def install() -> None:
    in_use.serves_few_rows, in_use.launch_few = serves_rows, launch
