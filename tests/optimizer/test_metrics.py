"""What is measured while training: names and units, anomalies in the log, the endpoint for Prometheus."""

from __future__ import annotations

import json
import logging
import re
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import superoffload
from superoffload.engine.stats import GAUGES
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.metrics import PER_STEP, PREFIX, TOTALS, Anomalies, Limits, Monitor, as_metrics
from tests.support.checkout import ROOT


@pytest.fixture
def optimizer() -> Iterator[superoffload.AdamW]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4096)) for _ in range(3)]
    made = superoffload.AdamW(params, lr=1e-2, max_grad_norm=100.0, speculation="always", bucket_numel=4096, threads=1)
    yield made
    made.close()


def train_step(optimizer: superoffload.AdamW, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    params = optimizer.param_groups[0]["params"]
    sum((scale * p * torch.ones(4096)).sum() for p in params).backward()
    optimizer.step()


def test_documentation_has_every_name_with_its_unit() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    for name, (unit, text) in {**TOTALS, **PER_STEP}.items():
        assert f"| `{name}` | {unit} | {text} |" in page, f"docs/metrics.md lacks {name}, or says something else"
    for rule in re.findall(r"superoffload_(\w+)", page):
        assert re.sub("_total$", "", rule) in {*TOTALS, *PER_STEP}, f"docs/metrics.md uses superoffload_{rule}"


def test_metrics_of_a_step(optimizer: superoffload.AdamW) -> None:
    times = iter([10.0, 12.0, 12.5])
    monitor = Monitor(optimizer, clock=lambda: next(times))
    assert PREFIX + "grad_norm" not in Monitor(optimizer).step(), "there was no step"
    train_step(optimizer)
    first = monitor.step()
    assert set(first) == {PREFIX + name for name in {**TOTALS, **PER_STEP}} and set(optimizer.stats()) == set(TOTALS)
    assert as_metrics({"a": float("nan"), "b": 2}) == {PREFIX + "b": 2.0}
    assert first[PREFIX + "step_seconds"] == 2.0
    assert first[PREFIX + "step_down_bytes_per_second"] == 3 * 4096 * 4 / 2.0
    assert first[PREFIX + "step_speculated_share"] > 0 and first[PREFIX + "clip_coefficient"] < 1.0
    assert first[PREFIX + "grad_norm"] == pytest.approx((3 * 4096) ** 0.5)
    train_step(optimizer, float("inf"))
    second = monitor.step()
    assert second[PREFIX + "skipped_steps"] == 1.0 and PREFIX + "grad_norm" not in second
    assert second[PREFIX + "step_seconds"] == 0.5 and second[PREFIX + "step_up_bytes_per_second"] == 0.0


def test_counters_go_on_where_an_earlier_run_ended(optimizer: superoffload.AdamW) -> None:
    earlier = Monitor(optimizer)
    train_step(optimizer)
    train_step(optimizer, float("nan"))
    before = earlier.step()
    kept = json.loads(json.dumps(earlier.state_dict()))
    assert set(kept) == set(TOTALS) - set(GAUGES)
    later = Monitor(optimizer)  # of the same optimizer, as a second train() in one process has it: counted once
    later.load_state_dict({**kept, "of_a_later_version": 3})
    train_step(optimizer, 1e-6)
    after = later.step()
    assert after[PREFIX + "steps"] == 2 and after[PREFIX + "skipped_steps"] == 1
    assert after[PREFIX + "clip_rate"] == pytest.approx(1 / 3) and before[PREFIX + "clip_rate"] == 1 / 2
    assert after[PREFIX + "bytes_down"] == pytest.approx(1.5 * before[PREFIX + "bytes_down"])
    assert after[PREFIX + "step_down_bytes_per_second"] > 0 and optimizer.stats()["steps"] == 2, "as before"
    empty = Monitor(optimizer)
    wrong: list[Any] = [{"steps": -1}, {"steps": "3"}, {"steps": float("nan")}, {"steps": True}, [3]]
    for counters in wrong:
        with pytest.raises(ArgumentError, match=r"^counters: "):
            empty.load_state_dict(counters)
    empty.load_state_dict({})
    assert empty.state_dict()["steps"] == 0


@pytest.mark.parametrize(
    ("seconds", "skipped", "patience", "text"),
    [(2.0, False, 10, "slow steps: steps take 2 s, usual were 1 s"), (1.0, True, 3, "skipped steps: 3 steps in a row")],
)
def test_an_anomaly_is_one_line_when_it_begins_and_one_when_it_is_over(
    caplog: pytest.LogCaptureFixture, seconds: float, skipped: bool, patience: int, text: str
) -> None:
    caplog.set_level(logging.INFO, "superoffload")
    anomalies = Anomalies(Limits(), "rank 3: ")
    for step in range(60):
        # a checkpoint now and then, and a lone step with a NaN
        anomalies.observe(step, 3.0 if step % 17 == 16 else 1.0, skipped=step % 13 == 0)
    for step in range(60, 60 + patience - 1):
        anomalies.observe(step, seconds, skipped=skipped)
    assert caplog.messages == [], "too early"
    for step in range(60 + patience - 1, 60 + patience + 2):
        anomalies.observe(step, seconds, skipped=skipped)
    (line,) = caplog.messages
    assert line.startswith(f"rank 3: step {60 + patience - 1}: {text}")
    assert caplog.records[0].levelno == logging.WARNING
    for step in range(100, 180):  # what lasts does not become usual
        anomalies.observe(step, seconds, skipped=skipped)
    assert caplog.messages == [line]
    for step in range(200, 203):
        anomalies.observe(step, 1.0, skipped=False)
    name = text.split(":")[0]
    assert len(caplog.messages) == 2 and caplog.messages[1].endswith(f"{name} is over")


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_endpoint_serves_what_the_monitor_saw(optimizer: superoffload.AdamW) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'superoffload[metrics]'")
    from superoffload.exporter import PrometheusExporter

    with PrometheusExporter(port=0, rank=2) as exporter:
        monitor = Monitor(optimizer, exporter=exporter)
        for scale in (1.0, 1.0, float("nan")):
            train_step(optimizer, scale)
            values = monitor.step()
        assert exporter._server.server_address[0] == "127.0.0.1", "open to this machine only"
        shown = scrape(exporter.port)
        assert shown['superoffload_steps_total{rank="2"}'] == 2
        assert shown['superoffload_skipped_steps_total{rank="2"}'] == 1
        for name in (*TOTALS, *PER_STEP):
            if PREFIX + name in values:
                total = "" if name in PER_STEP or name in GAUGES else "_total"
                assert shown[f'superoffload_{name}{total}{{rank="2"}}'] == pytest.approx(values[PREFIX + name]), name
        with pytest.raises(ArgumentError, match="cannot listen there"):
            PrometheusExporter(port=exporter.port)
        port = exporter.port
    with pytest.raises(OSError):
        scrape(port)


def test_endpoint_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.exporter import PrometheusExporter

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SuperOffloadError, match=r"pip install 'superoffload\[metrics\]'"):
        PrometheusExporter()
    with pytest.raises(ArgumentError, match="port=70000"):
        PrometheusExporter(port=70000)
