"""The text file for Prometheus, read back by Prometheus' own parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe.batch.prometheus import prometheus_text
from tests.metrics_record import make_monitor, make_record, run_job

EVIL = 'a "quoted" \\ name\nof two lines {x="y"}'


def parse(text: str) -> dict[str, Any]:
    assert text.endswith("\n")
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_record(tmp_path_factory.mktemp("job") / "report")


def test_every_number_is_there_with_type_and_help(record: dict[str, Any]) -> None:
    families = parse(prometheus_text(record))
    assert all(
        family.documentation and family.type in ("gauge", "counter", "histogram") for family in families.values()
    )
    assert all(name.startswith("sortyard_job_") for name in families)
    lines = {sample.labels["state"]: sample.value for sample in families["sortyard_job_lines"].samples}
    assert lines == {"answered": 2000, "failed": 46}
    errors = {sample.labels["kind"]: sample.value for sample in families["sortyard_job_errors"].samples}
    assert errors == {"invalid_line": 45, "request_failed": 1}
    tokens = families["sortyard_job_output_tokens"]
    assert tokens.type == "counter" and tokens.samples[0].value == record["output_tokens"]
    assert families["sortyard_job_kv_peak_use_ratio"].samples[0].value == record["kv_peak_use"]
    assert families["sortyard_job_info"].samples[0].labels["outcome"] == "some failed"
    found = {sample.labels["found"]: sample.value for sample in families["sortyard_job_offload_experts"].samples}
    assert found == {"yes": 9100, "no": 900}
    assert families["sortyard_job_offload_copied_bytes"].samples[0].value == 51.6e9
    assert families["sortyard_job_offload_stall_seconds"].samples[0].value == 0.4
    assert families["sortyard_job_rank_balance_ratio"].samples[0].value == 0.83
    assert families["sortyard_job_experts_moved"].samples[0].value == 96


def test_histograms_add_up(record: dict[str, Any]) -> None:
    families = parse(prometheus_text(record))
    for metric, name in (
        ("time_to_first_token", "first_token"),
        ("between_tokens", "between_tokens"),
        ("answer", "answer"),
    ):
        family = families[f"sortyard_job_{metric}_seconds"]
        values = {sample.name.rsplit("_", 1)[1]: sample.value for sample in family.samples}
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        times = record["latencies"][name]
        assert family.type == "histogram" and buckets == sorted(buckets) and buckets[0] < buckets[-1]
        assert buckets[-1] == values["count"] == times["count"] and values["sum"] == times["sum"]
        half = next(sample.value for sample in family.samples if sample.labels.get("le") == "0.05")
        assert name != "between_tokens" or 0.5 < half / times["count"] < 1.0


def test_any_text_may_be_a_label(record: dict[str, Any]) -> None:
    families = parse(prometheus_text(record | {"model": EVIL}))
    assert families["sortyard_job_info"].samples[0].labels["model"] == EVIL


def test_a_job_that_did_nothing_has_no_empty_families(tmp_path: Path) -> None:
    monitor = make_monitor(tmp_path / "report")
    monitor.finish(run_job(monitor, steps=0, failed=0), outcome="fault")
    text = (tmp_path / "report" / "metrics.prom").read_text("utf-8")
    families = parse(text)
    assert all(family.samples for family in families.values())
    assert "sortyard_job_answer_seconds" not in families and families["sortyard_job_steps"].samples[0].value == 0
