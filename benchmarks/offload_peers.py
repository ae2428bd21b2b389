"""Experts in host memory against transformers with accelerate's offload: `python benchmarks/offload_peers.py`.

One sequence decodes a model larger than the budget, on the same card and host, one engine after the other: ours loads
when the other's process has ended, since the host holds the weights once. Both have dummy weights and the
same bytes of the GPU: ours all in all (weights, working space, cache, context), theirs for weights, with what a step
needs on top. accelerate places whole layers and brings each one's weights, all experts among them, when it runs.

Our experts are chosen evenly, as dummy weights do: real routers repeat themselves more. Knows the interfaces of other
libraries, which is why it stands outside the product.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python puts there

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from launch.bench_engine import even_prompts  # noqa: E402
from launch.bench_offload import Decoding  # noqa: E402
from launch.command_line import compose_config, parse  # noqa: E402
from launch.console import set_up_logging  # noqa: E402
from launch.figure import Figure, print_figures  # noqa: E402
from launch.machine import machine_record  # noqa: E402
from launch.result_file import write_record  # noqa: E402
from launch.words import helped, number_above_zero, output_file, own_words, positive, refuse  # noqa: E402
from moe.engine.engine import Engine  # noqa: E402
from moe.engine.memory_plan import GIB  # noqa: E402
from moe.engine.parts import resolve_device  # noqa: E402

KEYS = {
    "model": "shapes in benchmarks/models/ or a folder with config.json (mixtral-8x7b)",
    "gpu_gb": "GiB of the GPU that either may use (24)",
    "prompt": "tokens (64)",
    "tokens": "that we decode, after 8 (32)",
    "peer_tokens": "that the other decodes, after one (3)",
    "seconds": "of the other's decoding, at most (60); one token is always measured",
    "device": "auto, cuda or cpu",
    "commit": "the commit, where the tree cannot say it",
    "result": "a JSON file",
}
SIDES = ("accelerate", "ours")  # in this order: pageable memory is given back at once
TARGET = 6.0  # times the other's tokens/s
WARM = 8
MAX_MODEL_LEN = 512
BLOCK_ELEMENTS = 1 << 25  # of the random block that fills the other's weights, again and again


def our_reading(own: Mapping[str, str], rest: Sequence[str]) -> dict[str, Any]:
    """Through an engine, which plans by the budget what it holds."""
    _wait_for_turn()
    device = resolve_device(own.get("device", "auto"))
    words = ["load_format=dummy", "cache.prefix_caching=false", f"--model={model_folder(own)}"]
    words += [f"engine.device={device.type}", "engine.max_num_seqs=1", "engine.max_batched_tokens=512"]
    words += [f"engine.max_model_len={MAX_MODEL_LEN}", "engine.capture_seconds=0", "offload.regime=auto"]
    if device.type == "cuda":
        words.append(f"cache.memory_fraction={budget_bytes(own) / torch.cuda.mem_get_info(device)[1]:.6f}")
    begin = time.perf_counter()
    engine = Engine(compose_config(parse([*words, *rest])))
    ready_s = time.perf_counter() - begin
    try:
        length, tokens = positive("prompt", own.get("prompt", "64")), positive("tokens", own.get("tokens", "32"))
        prompts = even_prompts(engine.vocab_size, 1, length, MAX_MODEL_LEN - length)
        decoding = Decoding(engine, prompts, "ours")
        steps = decoding.run(tokens, skip=WARM)
        decoding.end()
        offload = engine.parts.offload
        return {
            "token_seconds": list(steps.times),
            "ready_seconds": ready_s,
            "gpu_bytes": _gpu_bytes_in_use(device),
            "host_bytes": engine.plan.host_bytes,
            "link_bytes": steps.each("num_bytes"),
            "held": 1.0 if offload is None else offload.plan.held_share,
        }
    finally:
        engine.close()


def accelerate_reading(own: Mapping[str, str]) -> dict[str, Any]:
    """transformers' network of the same shapes, dispatched by accelerate."""
    _wait_for_turn()
    device = resolve_device(own.get("device", "auto"))
    begin = time.perf_counter()
    network, hidden = offloaded_network(model_folder(own), budget_bytes(own), device)
    ready_s = time.perf_counter() - begin
    length, tokens = positive("prompt", own.get("prompt", "64")), positive("peer_tokens", own.get("peer_tokens", "3"))
    vocab = network.config.vocab_size
    (prompt,) = even_prompts(vocab, 1, length, 1)
    most_s = number_above_zero(own, "seconds", float, 60.0)
    ids_BT = torch.tensor([prompt.token_ids], device=device)
    times = decode_seconds(network, ids_BT, tokens, most_s)
    return {
        "token_seconds": times,
        "ready_seconds": ready_s,
        "gpu_bytes": _gpu_bytes_in_use(device),
        "host_bytes": sum(each.nbytes for each in hidden.values()),
    }


def offloaded_network(folder: Path, budget: int, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """The network, and its weights that stay in host memory, by name. All are one random block again and again."""
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    device_map: dict[str, Any] = {"": "cpu"}
    if device.type == "cuda":
        device_map = infer_auto_device_map(
            network,
            max_memory={device.index or 0: budget, "cpu": 1 << 50},
            no_split_module_classes=list(network._no_split_modules or ()),
            dtype=torch.bfloat16,
        )
    hidden: dict[str, Tensor] = {}
    block = torch.randn(BLOCK_ELEMENTS, dtype=torch.bfloat16) * 0.02
    on_gpu = block.to(device)
    for name, parameter in list(network.named_parameters()):
        place = next(place for prefix, place in device_map.items() if not prefix or f"{name}.".startswith(f"{prefix}."))
        target = torch.device("cpu") if place == "cpu" else device
        filled = fill(
            torch.empty(parameter.shape, dtype=torch.bfloat16, device=target), on_gpu if place != "cpu" else block
        )
        if name.endswith("norm.weight"):
            filled.fill_(1.0)
        if place == "cpu":
            hidden[name] = filled
        owner, _, own_name = name.rpartition(".")
        setattr(network.get_submodule(owner), own_name, nn.Parameter(filled, requires_grad=False))
    return dispatch_model(network, device_map=device_map, force_hooks=True), hidden


def fill(tensor: Tensor, block: Tensor) -> Tensor:
    """The block again and again, in place."""
    flat = tensor.view(-1)
    for at in range(0, flat.numel(), block.numel()):
        part = flat[at : at + block.numel()]
        part.copy_(block[: part.numel()])
    return tensor


@torch.inference_mode()
def decode_seconds(network: Any, ids_BT: Tensor, tokens: int, most_s: float) -> list[float]:
    """Of each token after the first, which the prompt gives; the likeliest each. At least one is measured."""
    result = network(ids_BT, use_cache=True)
    times: list[float] = []
    while len(times) < tokens and (not times or sum(times) < most_s):
        next_B1 = result.logits[:, -1:].argmax(dim=-1).to(ids_BT.device)
        _synchronize(ids_BT.device)
        begin = time.perf_counter()
        result = network(next_B1, past_key_values=result.past_key_values, use_cache=True)
        _synchronize(ids_BT.device)
        times.append(time.perf_counter() - begin)
    return times


def model_folder(own: Mapping[str, str]) -> Path:
    """ValueError where there are no shapes."""
    name = own.get("model", "mixtral-8x7b")
    shapes = ROOT / "benchmarks" / "models" / name
    folder = shapes if shapes.is_dir() else Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model={name} holds no config.json; give a folder or a name in benchmarks/models/.")
    return folder


def budget_bytes(own: Mapping[str, str]) -> int:
    """Of the GPU."""
    return int(number_above_zero(own, "gpu_gb", float, 24.0) * GIB)


def _wait_for_turn() -> None:
    """Libraries are imported; memory is taken when the other side is over."""
    if not sys.stdin.readline():
        raise SystemExit("nobody waits for this side any more")


def _gpu_bytes_in_use(device: torch.device) -> int:
    """Of this process: at most, as its allocator took them, and what the driver took besides."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device) + total - free - torch.cuda.memory_reserved(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_sides(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each in a process of its own, in turns; ours imports its libraries meanwhile."""
    script = [sys.executable, str(Path(__file__).resolve()), *words]
    huge_pages = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}  # torch's key: fewer page faults while weights are filled
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": huge_pages}
    sides = {side: subprocess.Popen([*script, f"side={side}"], **options) for side in SIDES}
    found = {}
    try:
        for side, process in sides.items():
            out, _ = process.communicate("go\n")
            if process.returncode:
                raise RuntimeError(f"the side of {side} ended with {process.returncode}")
            found[side] = json.loads(out.splitlines()[-1])
            print(f"{side}: {found[side]}", flush=True)
    finally:
        for process in sides.values():
            process.kill()
            process.wait()
    return found


def figures(found: Mapping[str, Mapping[str, Any]], model: str, gpu_gb: float) -> list[Figure]:
    """tokens/s of both; ours has the other's times six as its target."""
    rates = {side: 1 / statistics.median(reading["token_seconds"]) for side, reading in found.items()}
    made = []
    for side, reading in found.items():
        names = {"gpu_bytes": "GPU GiB", "host_bytes": "host GiB", "link_bytes": "link GiB/token"}
        extra = {label: reading[name] / GIB for name, label in names.items() if name in reading}
        extra |= {"ready s": reading["ready_seconds"]}
        if side == "ours":
            extra |= {"x accelerate": rates["ours"] / rates["accelerate"], "held %": 100 * reading["held"]}
        made.append(
            Figure(
                "offload peers",
                model,
                f"{side}, one sequence, {gpu_gb:g} GiB",
                rates[side],
                "tokens/s",
                target=TARGET * rates["accelerate"] if side == "ours" else None,
                extra=extra,
                samples=tuple(1 / each for each in reading["token_seconds"]),
            )
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both and print. 2: a wrong command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if helped(words, __doc__, KEYS):
        return 0
    own, rest = own_words(words, {*KEYS, "side"})
    try:
        side, result, folder = own.get("side"), output_file(own, "result"), model_folder(own)
        if side not in (None, *SIDES):
            raise ValueError(f"side={side} is unknown; it is accelerate or ours.")
        device = resolve_device(own.get("device", "auto"))
    except ValueError as error:
        return refuse(error)
    if side is not None:
        set_up_logging(Console(stderr=True))
        print(json.dumps(our_reading(own, rest) if side == "ours" else accelerate_reading(own)), flush=True)
        return 0
    shown = [word for word in words if not word.startswith(("result=", "commit="))]
    command = shlex.join(["python", "benchmarks/offload_peers.py", *shown])
    record = machine_record(device, command, own.get("commit"))
    made = figures(run_sides(words), folder.name, budget_bytes(own) / GIB)
    print_figures(made, Console(width=240))
    write_record(record, made, result, complete=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
