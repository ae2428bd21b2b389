"""Try tiles of the grouped products: `python -m launch.tune shapes=qwen3 tokens=1,64 seconds=60 write=true`.

For each layer shape and number of tokens, both products: every candidate once briefly, then the best few and the rule's
own choice interleaved, by graph replay over rotating operands. Compiling is most of the work, so worker processes fill
Triton's cache first, side by side. `seconds` bounds the measuring of all points together; what did not fit is said.

Knows operands and a clock; what is tried and what wins is tile_trials.py's. `write=true` puts what beats the rule into
the card's table, which the kernels ask before the rule (kernels/tuned/: by device, experts, sizes and dtype); `result`
is a file with all times.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kernels.grouped_gemm import grouped_gemm_swiglu_triton, grouped_gemm_triton
from kernels.tiles import TileConfig, device_generation
from launch.bench_layer import TOKENS, LayerBank, LayerOperands, LayerShape, experts_hit, layer_shape
from launch.figure import number
from launch.machine import machine_record
from launch.replay import Call, time_variants
from launch.tile_trials import (
    Outcome,
    Point,
    Product,
    as_dict,
    candidates,
    mean_rows,
    num_products,
    rule_tile,
    tune_point,
    write_table,
)
from launch.words import (
    helped,
    number_above_zero,
    output_file,
    positives,
    refuse,
    split_list,
    unknown_word,
)
from moe.engine.whole_file import write_whole

PRODUCTS: tuple[Product, ...] = ("gemm1", "gemm2")
KEYS = ("shapes", "tokens", "products", "seconds", "workers", "commit", "result", "write")


def product_calls(rotation: Sequence[LayerOperands], which: Product, tile: TileConfig) -> list[Call]:
    """The calls of one product over a rotation. Rows are packed beforehand; gemm2 reads random rows."""
    calls: list[Call] = []
    for operands in rotation:
        inputs = operands.dispatcher.dispatch(operands.x_TD, *operands.routing)
        if which == "gemm1":
            calls.append(
                lambda inputs=inputs, w=operands.w13_S2FD: grouped_gemm_swiglu_triton(
                    inputs.rows_XD,
                    w,
                    inputs.offsets_S1,
                    row_index_R=inputs.row_index_R,
                    num_rows=inputs.num_rows,
                    tile=tile,
                )
            )
        else:
            h_RF = operands.x_TD.new_empty(inputs.num_rows, operands.w2_SDF.shape[2]).normal_()
            calls.append(
                lambda inputs=inputs, h=h_RF, w=operands.w2_SDF: grouped_gemm_triton(
                    h, w, inputs.offsets_S1, num_rows=inputs.num_rows, tile=tile
                )
            )
    return calls


def compile_tile(shape: LayerShape, which: Product, tile: TileConfig) -> str | None:
    """Compile one tile for a shape, in a process of its own: no row is computed. What went wrong, or None."""
    device = torch.device("cuda")
    offsets_S1 = torch.zeros(shape.num_experts + 1, dtype=torch.int32, device=device)
    index_R = torch.zeros(16, dtype=torch.int32, device=device)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=device)

    try:
        if which == "gemm1":
            w_S2FD = empty(shape.num_experts, 2 * shape.width, shape.hidden)
            x_XD = empty(16, shape.hidden)
            for rows in (index_R, None):  # gathered, or of many rows copied in order
                grouped_gemm_swiglu_triton(x_XD, w_S2FD, offsets_S1, row_index_R=rows, num_rows=16, tile=tile)
        else:
            w_SDF = empty(shape.num_experts, shape.hidden, shape.width)
            grouped_gemm_triton(empty(16, shape.width), w_SDF, offsets_S1, num_rows=16, tile=tile)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that cannot be compiled must not end the sweep
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None


class Tuner:
    """Points of several shapes under one deadline."""

    def __init__(self, device: torch.device, workers: int, seconds: float, console: Console) -> None:
        self.device, self.workers, self.seconds, self.console = device, workers, seconds, console
        self.failed: dict[str, str] = {}
        self._compiled: dict[tuple[str, Product, TileConfig], bool] = {}

    def compile(self, wanted: Iterable[tuple[LayerShape, Product, TileConfig]]) -> float:
        """Fill Triton's cache; seconds it took."""
        jobs = list(dict.fromkeys(wanted))
        started = time.monotonic()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            for (shape, which, tile), error in zip(jobs, pool.map(compile_tile, *zip(*jobs), chunksize=1)):
                self._compiled[shape.name, which, tile] = error is None
                if error is not None:
                    self.failed[f"{shape.name} {which} {tile.name}"] = error
        return time.monotonic() - started

    def run(self, shapes: Sequence[LayerShape], tokens: Sequence[int], products: Sequence[Product]) -> list[Outcome]:
        """Every point gets an equal part of the time that is left when its turn comes."""
        generation = device_generation(torch.empty(0, device=self.device))
        points: list[tuple[LayerShape, int, Product, list[TileConfig], TileConfig]] = [
            (
                shape,
                num_tokens,
                which,
                candidates(mean_rows(shape, num_tokens), num_products(which), generation),
                rule_tile(shape, which, num_tokens, generation),
            )
            for shape in shapes
            for num_tokens in tokens
            for which in products
        ]
        compile_s = self.compile(
            (shape, which, tile) for shape, _, which, tiles, rule in points for tile in (*tiles, rule)
        )
        self.console.print(f"compiled in {compile_s:.1f} s; {len(self.failed)} tiles could not be")
        end = time.monotonic() + self.seconds
        outcomes: list[Outcome] = []
        bank: LayerBank | None = None
        for index, (shape, num_tokens, which, tiles, rule) in enumerate(points):
            if bank is None or bank.shape != shape:
                del bank
                torch.cuda.empty_cache()
                bank = LayerBank(shape, self.device)
            rotation = bank.operands(num_tokens)
            rows = num_tokens * shape.top_k / experts_hit(rotation)
            now = time.monotonic()
            deadline = now + max(end - now, 0.0) / (len(points) - index)
            usable = [tile for tile in tiles if self._compiled[shape.name, which, tile]]
            point = Point(shape.name, which, num_tokens, rows)
            outcomes.append(tune_point(point, usable, rule, self._timer(rotation, which), deadline))
        return outcomes

    def _timer(
        self, rotation: Sequence[LayerOperands], which: Product
    ) -> Callable[[dict[str, TileConfig], float], dict[str, float]]:
        def time_tiles(named: dict[str, TileConfig], seconds: float) -> dict[str, float]:
            variants = {name: product_calls(rotation, which, tile) for name, tile in named.items()}
            timings = time_variants(variants, self.device, seconds=seconds)
            return {name: timing.median for name, timing in timings.items()}

        return time_tiles


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """Best tile, its time, and how far the rule is from it."""
    table = Table(title="tiles")
    for column in ("shape", "product", "T", "rows", "best", "us", "rule us", "rule/best", "tried", "skipped"):
        table.add_column(column, no_wrap=True)
    for outcome in outcomes:
        point, final = outcome.point, outcome.final
        assert outcome.best is not None, "a point without a final"
        table.add_row(
            point.shape,
            point.product,
            str(point.num_tokens),
            number(point.rows),
            outcome.best,
            number(final[outcome.best] * 1e6),
            number(final["rule"] * 1e6),
            number(outcome.rule_over_best or 0.0),
            str(len(outcome.screened)),
            str(outcome.skipped),
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, print, write. 2: a wrong command line, or no GPU."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__):
        return 0
    try:
        own = read_words(words)
        shapes = [layer_shape(text) for text in split_list(own.get("shapes", "qwen3,mixtral,dsv3-ep8"))]
        if any(shape.fp8 for shape in shapes):
            raise ValueError(f"shapes={own['shapes']}: fp8 experts have kernels of their own; name shapes of bf16.")
        tokens = positives(own, "tokens", TOKENS)
        chosen = split_list(own.get("products", "gemm1,gemm2"))
        products: list[Product] = [name for name in PRODUCTS if name in chosen]
        if len(products) != len(chosen) or not products:
            raise ValueError(f"products={own['products']} is unknown; use gemm1, gemm2 or both.")
        seconds = number_above_zero(own, "seconds", float, 120.0)
        write = own.get("write", "false")
        if write not in ("true", "false"):
            raise ValueError(f"write={write} is neither true nor false.")
        workers, result = number_above_zero(own, "workers", int, 12), output_file(own, "result")
        if not torch.cuda.is_available():
            raise ValueError("tiles are chosen by timing them on an NVIDIA GPU, and torch sees none.")
    except ValueError as error:
        return refuse(error)
    console, device = Console(width=200), torch.device("cuda", torch.cuda.current_device())
    record = machine_record(device, "python -m launch.tune " + " ".join(words), own.get("commit"))
    tuner = Tuner(device, workers, seconds, console)
    outcomes = tuner.run(shapes, tokens, products)
    print_outcomes(outcomes, console)
    if result is not None:
        whole = record | {"failed": tuner.failed, "points": [as_dict(outcome) for outcome in outcomes]}
        write_whole(result, json.dumps(whole, indent=1) + "\n")
        print(f"result: {result}")
    if write == "true":
        print(f"table: {write_table(torch.cuda.get_device_name(device), outcomes)}")
    return 0


def read_words(words: Sequence[str]) -> dict[str, str]:
    """key=value words; ValueError for a key that is not one."""
    own = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in KEYS:
            raise unknown_word(word, KEYS, "the tuner")
        own[name] = text
    return own


if __name__ == "__main__":
    sys.exit(main())
