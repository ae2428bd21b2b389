"""What each dtype of the cache costs in quality: the demo models' predictions of a text they have not seen, against
those over a cache in the model's own dtype. The figures are in docs/log.md."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import moe
from kernels.quantize import FP8_MAX
from kv_cache.layout import KVLayout, LayerScales, Quantization
from moe.engine.tokenizer import Tokenizer
from moe.model.causal_lm import CausalLM
from moe.model.load_model import load_model
from tests.step_driver import StepDriver

DEMO = Path(moe.__file__).parent / "demo"
LENGTH, DECODED = 200, 8


class Bound(NamedTuple):
    """Kullback-Leibler divergence per token in nats, |change of the loss| in nats, share of equal likeliest tokens."""

    divergence: float
    drift: float
    agreement: float


BOUNDS: dict[tuple[str, Quantization], Bound] = {
    ("mixtral", "fp8"): Bound(0.006, 0.02, 0.95),
    ("mixtral", "fp8-layer"): Bound(0.008, 0.02, 0.94),
    ("mixtral", "int4"): Bound(0.03, 0.03, 0.89),
    ("deepseek", "fp8"): Bound(0.014, 0.02, 0.92),
    ("deepseek", "fp8-layer"): Bound(0.02, 0.03, 0.9),
}


def predictions(model: CausalLM, driver: StepDriver, texts: list[list[int]]) -> Tensor:
    """Log-probabilities of every position's next token, those of the last few decoded one by one."""
    rows = driver.run(prefill={str(i): ids[:-DECODED] for i, ids in enumerate(texts)})
    parts = [[rows[str(i)]] for i in range(len(texts))]
    for step in range(LENGTH - DECODED, LENGTH):
        rows = driver.run(decode={str(i): ids[step] for i, ids in enumerate(texts)})
        for i, part in enumerate(parts):
            part.append(rows[str(i)])
    return torch.cat([torch.cat(part)[:-1] for part in parts]).log_softmax(-1)


def calibrated(driver: StepDriver, latents: bool) -> tuple[LayerScales, ...]:
    """The largest magnitude of each layer over 448, from a cache in its own dtype: it holds NaN where unused."""
    scales: list[LayerScales] = []
    for cache in driver.kv_caches:
        values = cache.values.nan_to_num(0.0).abs()
        parts = (values, values) if latents else values.unbind(1)
        scales.append(LayerScales(*(float(part.amax()) / FP8_MAX for part in parts)))
    return tuple(scales)


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_C49_predictions_of_the_demo_models_over_caches_of_codes(name: str) -> None:
    model = load_model(DEMO / name, dtype=torch.float32, device=torch.device("cpu"), max_model_len=LENGTH + 8)
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer(DEMO / name).encode_prompt(text)
    texts = [ids[start : start + LENGTH] for start in range(0, 4 * LENGTH, LENGTH)]
    targets_T1 = torch.tensor([token for each in texts for token in each[1:]])[:, None]
    plain = StepDriver(model)
    plain_TV = predictions(model, plain, texts)
    for (of_model, quantization), bound in BOUNDS.items():
        if of_model != name:
            continue
        scales = calibrated(plain, name == "deepseek") if quantization == "fp8-layer" else ()
        coded_TV = predictions(model, StepDriver(model, quantization=quantization, layer_scales=scales), texts)
        divergence = float((plain_TV.exp() * (plain_TV - coded_TV)).sum(-1).mean())
        change_T1 = (plain_TV - coded_TV).gather(1, targets_T1)
        agreement = float((plain_TV.argmax(-1) == coded_TV.argmax(-1)).float().mean())
        figures = (
            f"{name} {quantization}: divergence {divergence:.4f}, drift {float(change_T1.mean()):+.4f} (each token "
            f"{float(change_T1.abs().mean()):.3f}), agreement {agreement:.4f}"
        )
        print(figures)
        assert 0 < divergence < bound.divergence and abs(float(change_T1.mean())) < bound.drift, figures
        assert bound.agreement < agreement < 1, figures


def test_int4_latents_are_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match=r"cache\.dtype=int4 is not offered for latent attention.*use cache\.dtype=fp8"
    ):
        KVLayout.mla(5, 16, 64, 16, torch.float32, "int4")
