"""Others on the same card in the same run: `python benchmarks/peers.py workload=w4 shapes=qwen3 tokens=1,64,4096`.

w4: `torch._grouped_mm` beside our layer, replay by replay. w2: transformers' own network and `generate` on dummy
weights, ms per decode step; it wants the card for itself, so no engine of ours runs in that process.

Keys: those of launch.bench for w4; for w2 model, batches (1,8,64) and outputs (33). Knows other libraries' interfaces,
which is why it stands outside the product.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python puts there

from launch.bench import read_choice  # noqa: E402
from launch.bench_layer import LayerOperands, measure_layer  # noqa: E402
from launch.figure import Figure, baseline, load_baselines, print_figures  # noqa: E402
from launch.replay import Call  # noqa: E402
from launch.result_file import begin_record, write_record  # noqa: E402
from launch.words import refuse  # noqa: E402
from moe.engine.parts import resolve_device  # noqa: E402

PROMPT_TOKENS = 512


def grouped_mm_layer(operands: LayerOperands) -> Tensor:
    """The layer as plain torch writes it: sort the rows by expert, two grouped products, undo the sort, weighted sum.

    No host sync: the offsets stay on the device.
    """
    ids_TK, weights_TK = operands.routing
    num_tokens, top_k = ids_TK.shape
    num_experts = operands.w2_SDF.shape[0]
    sorted_R, order_R = ids_TK.flatten().sort(stable=True)
    bounds_E = torch.arange(num_experts, dtype=ids_TK.dtype, device=ids_TK.device)
    ends_E = torch.searchsorted(sorted_R, bounds_E, right=True).to(torch.int32)
    rows_RD = operands.x_TD[order_R // top_k]
    gate_up_R2F = torch._grouped_mm(rows_RD, operands.w13_S2FD.transpose(1, 2), offs=ends_E)
    gate_RF, up_RF = gate_up_R2F.chunk(2, dim=-1)
    h_RF = torch.nn.functional.silu(gate_RF) * up_RF
    y_RD = torch._grouped_mm(h_RF, operands.w2_SDF.transpose(1, 2), offs=ends_E)
    back_RD = torch.empty_like(y_RD).index_copy_(0, order_R, y_RD)
    weighted_TKD = back_RD.view(num_tokens, top_k, -1) * weights_TK.to(y_RD.dtype).unsqueeze(-1)
    return weighted_TKD.sum(dim=1)


def grouped_mm_calls(rotation: Sequence[LayerOperands]) -> list[Call]:
    """A peer for launch.bench_layer.measure_layer."""
    return [lambda operands=operands: grouped_mm_layer(operands) for operands in rotation]


class TransformersDecode:
    """transformers' network of a shape in benchmarks/models/, randomly initialised (normal, std 0.02)."""

    def __init__(self, model: str, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(ROOT / "benchmarks" / "models" / model)
        with device:
            self.network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.device = device

    @torch.inference_mode()
    def step_seconds(self, batch: int, outputs: int) -> float:
        """One decode step: the time of `outputs` tokens less that of one, over the steps between."""
        vocab = self.network.config.vocab_size
        ids_BT = torch.randint(vocab, (batch, PROMPT_TOKENS), device=self.device)
        seconds = {}
        for length in (2, 1, outputs):  # the first warms up
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            self.network.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[length] = time.perf_counter() - started
        return (seconds[outputs] - seconds[1]) / (outputs - 1)


def decode_figures(model: str, batches: Sequence[int], outputs: int, device: torch.device) -> list[Figure]:
    """Three samples a batch."""
    network = TransformersDecode(model, device)
    figures = []
    for batch in batches:
        samples = tuple(network.step_seconds(batch, outputs) * 1e3 for _ in range(3))
        peers, _ = baseline(load_baselines(), "w2", model, str(batch))
        name = f"batch {batch}, transformers"
        figures.append(Figure("w2", model, name, statistics.median(samples), "ms", peers=peers, samples=samples))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run one comparison. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    own = {name: text for name, _, text in (word.partition("=") for word in words)}
    console = Console(width=240)
    command = ["python", "benchmarks/peers.py", *words]
    try:
        if own.get("workload") == "w2":
            device = resolve_device(own.get("device", "auto"))
            batches = [int(text) for text in own.get("batches", "1,8,64").split(",")]
            model = own.get("model", "qwen3-30b-a3b")
            print_figures(decode_figures(model, batches, int(own.get("outputs", "33")), device), console)
            return 0
        choice = read_choice(words)
        if choice.workloads != ("w4",):
            raise ValueError(f"workload={own.get('workload')} has no peer here; use w4 or w2.")
        device = resolve_device(choice.device)
    except ValueError as error:
        return refuse(error)
    baselines = load_baselines()
    record, ceilings = begin_record(device, baselines, command, choice.commit)
    figures: list[Figure] = []
    for shape in choice.shapes:
        measured = measure_layer(
            shape,
            choice.tokens,
            device,
            ceilings,
            baselines,
            parts=choice.parts,
            seconds=choice.seconds,
            peers={"grouped_mm": grouped_mm_calls},
        )
        figures += measured
        print_figures(measured, console)
        write_record(record, figures, choice.result, complete=shape == choice.shapes[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
