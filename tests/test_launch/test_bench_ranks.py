"""w1 on ranks that share the experts: shares of the requests, one figure of all, a skewed routing by rows alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from pathlib import Path

import pytest
import torch

from kernels.pack import Packed
from kernels.rmsnorm import Norm
from launch import bench, bench_ranks, result_file
from launch.bench_engine import Prompt
from launch.bench_ranks import SkewedGate, read_skew, short_forms
from launch.roofline import Ceilings
from router.gate import Gate, Router
from router.synthetic import skewed_routing
from tests.ranks import run_ranks

PROMPTS = [Prompt([5 + index, 6, 7], 2 + index % 3) for index in range(7)]


def bench_on(rank: int, num_ranks: int, port: int, result: str, *more: str) -> tuple[int, str]:
    """Exit code and what is said."""
    values = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    bench_ranks.SHORT_OUTPUTS = 6
    bench_ranks.throughput_prompts = lambda vocab_size, num_requests=7: PROMPTS[:num_requests]
    setattr(result_file, "measure_ceilings", lambda device: Ceilings(1e9, 2e9, "a test"))  # noqa: B010 - it takes a dtype too
    words = ["workload=w1", "model=demo", "device=cpu", "requests=7", "rounds=2", "skew=1", f"result={result}", *more]
    words += ["engine.max_model_len=128", "cache.num_blocks=64", "balance.interval=2", "balance.move=always"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = bench.main(words)
    return code, said.getvalue()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_ranks_share_the_requests(tmp_path: Path) -> None:
    """Two timed passes of all tokens, while experts move; the first rank alone speaks and writes."""
    result = str(tmp_path / "r.json")
    (first, said), (second, nothing) = run_ranks(bench_on, 2, free_port(), result, joined=False)
    assert first == second == 0 and "demo x2" in said and nothing == ""
    record = json.loads((tmp_path / "r.json").read_text())
    (figure,) = record["figures"]
    assert record["complete"]
    tokens = sum(prompt.num_outputs for prompt in PROMPTS)
    assert record["engines"]["demo"]["stats"]["output_tokens"] == 3 * tokens  # one pass warms up
    assert figure["name"] == "output tokens, 7 requests, auto exact" and len(figure["samples"]) == 2
    assert figure["value"] == pytest.approx(tokens / figure["seconds"], rel=0.5) and figure["floor"] > 0
    assert figure["extra"]["requests"] == 7 and figure["extra"]["experts moved"] > 0
    assert 0.5 <= figure["extra"]["rank balance"] <= 1


def test_short_forms_warm_up(tmp_path: Path) -> None:
    """One engine, two figures, each of its own requests; without a floor."""
    more = ("requests=7,4", "rounds=1", "warm=short")
    for code, _ in run_ranks(bench_on, 2, free_port(), str(tmp_path / "r.json"), *more, joined=False):
        assert code == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert [figure["extra"]["requests"] for figure in record["figures"]] == [7, 4]
    assert all("floor" not in figure for figure in record["figures"])
    tokens = sum(each.num_outputs for each in PROMPTS + PROMPTS[:4])
    # Each rank's short forms: 4 and 3 of the seven, 2 and 2 of the four.
    warm = sum((2, 3, 4, 6)) + sum((2, 4, 6)) + 2 * sum((2, 6))
    assert record["engines"]["demo"]["stats"]["output_tokens"] == tokens + warm
    assert [each.num_outputs for each in short_forms([Prompt([5] * 500, 1)] * 3)] == [2, 81, 160]
    assert len(short_forms([Prompt([5] * 500, 1)])[0].token_ids) == 64


def test_a_row_is_routed_alike_in_any_batch() -> None:
    """By its first bits alone: equal rows alike, padding to no expert; and as skewed as the table is."""
    table = skewed_routing(4093, 16, 2, exponent=1.0, seed=3)
    gate = SkewedGate(table)
    x_TD = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    x_TD[1] = x_TD[0]
    ids_TK, weights_TK = gate(x_TD)
    assert torch.equal(ids_TK[0], ids_TK[1]) and ids_TK.dtype == torch.int32
    assert torch.equal(gate(x_TD[7:9]).expert_ids_TK, ids_TK[7:9])
    assert torch.equal(gate(x_TD[7:9]).weights_TK, weights_TK[7:9])
    real_T = torch.ones(500, dtype=torch.bool)
    real_T[5] = False
    assert gate(x_TD, real_T).expert_ids_TK[5].tolist() == [-1, -1]
    own_E, table_E = (torch.bincount(ids.flatten(), minlength=16) for ids in (ids_TK, table.expert_ids_TK))
    assert int(own_E.argmax()) == int(table_E.argmax()) and own_E.max() > 2 * own_E.float().mean()


def test_all_ways_to_ask_a_gate_go_by_the_table() -> None:
    """Whatever a layer asks of its gate: a way that is the model's own router would route evenly, unseen."""
    callables = {name for name, each in vars(Gate).items() if callable(each)}
    asked = {name for name in callables if name == "__call__" or not name.startswith("_")}
    assert {"__call__", "and_pack", "norm_and_pack"} <= asked
    assert asked <= set(vars(Router)), f"no router but a Gate has {asked - set(vars(Router))}"
    table = skewed_routing(4093, 16, 2, exponent=1.0, seed=3)
    gate = SkewedGate(table)
    x_TD, residual_TD = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()
    slot_of_E, norm = torch.arange(16, dtype=torch.int32), Norm(torch.ones(8), 1e-6)
    y_TD, new_residual_TD, routing, packed = gate.norm_and_pack(x_TD, residual_TD, norm, slot_of_E, 16)
    assert torch.equal(new_residual_TD, x_TD + residual_TD)
    assert torch.equal(routing.expert_ids_TK, gate(y_TD).expert_ids_TK)
    assert isinstance(packed, Packed)
    assert packed.offsets_S1.diff().tolist() == torch.bincount(routing.expert_ids_TK.flatten(), minlength=16).tolist()


def test_wrong_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    for word in ("skew=-1", "skew=much"):
        name, _, text = word.partition("=")
        with pytest.raises(ValueError, match=f"{word} must be a number from 0"):
            read_skew({name: text})
    assert read_skew({"skew": "0"}) == 0.0 and read_skew({}) is None
    assert bench.main(["workload=w1,w2"]) == 2
    assert "under torchrun give ep or w1, alone" in capsys.readouterr().err
    for word, text in (("limit=3", "under torchrun give requests="), ("warm=up", "warm=up is unknown; use whole")):
        assert bench.main(["workload=w1", word]) == 2
        assert text in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    for word in ("skew=1", "requests=4", "warm=short"):
        assert bench.main(["workload=w1", word]) == 2
        assert f"{word} needs ranks" in capsys.readouterr().err
