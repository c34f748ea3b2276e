"""benchmarks/gh200 at toy size: two ranks under torchrun, its setting, its clock, its table and plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gh200 import published
from benchmarks.gh200.__main__ import NAME, all_jobs, main, parse
from benchmarks.gh200.engines import ENGINES
from benchmarks.gh200.report import draw, measured, text
from benchmarks.gh200.setting import LR, PUBLISHED_SIZES, Run, published_run, toy_run
from benchmarks.gpu_suite.rows import SMOKE
from benchmarks.gpu_suite.settings import parameters_of
from benchmarks.jobs import LEFT, check_keys
from benchmarks.planned_and_published import PARAMETERS_WITHOUT_EMBEDDINGS
from superoffload.host.environment import DEVICE_TIMEOUT
from superoffload.tools.cli import build_parser
from tests.convergence.local_ranks import LocalRanks
from tests.support.benchmarks import parser_of


def toy(out: Path, *more: str) -> list[str]:
    return ["--out", str(out), "--device", "cpu", "--toy", *more]


@pytest.mark.in_turn
def test_two_ranks_under_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same run by the common means, fp32 parameters and torch's AdamW give the same curve."""
    arguments = toy(tmp_path, "--only", "published", "--ranks", "2", "--hidden", "32")
    assert main([*arguments, "--engines", "ours", "SuperOffload"]) == 0
    report = json.loads((tmp_path / NAME).read_text())
    smoke, ours, peer = report["rows"]
    assert smoke["status"] == "done" and smoke["result"]["wrong"] == []
    assert (peer["status"], peer["error"]) == ("not here", "needs a GPU")
    result = ours["result"]
    run = Run.from_json(ours["settings"]["run"])
    assert run == toy_run("ours", "cpu", 2, 32)
    assert result["stats"]["steps"] == run.steps == len(result["losses"])
    assert result["tokens_per_second"] == pytest.approx(run.tokens_per_step / result["seconds_per_step"])
    assert result["host_peak_bytes"] >= result["host_average_bytes"] >= 0 and result["gpu_peak_bytes"] is None
    printed = capfd.readouterr().out
    assert "needs a GPU" in printed and f"{result['losses'][-1]:.4f}" in printed
    assert (tmp_path / "published.png").read_bytes().startswith(b"\x89PNG")
    with LocalRanks(2) as ranks:
        others = ranks.run(published.train, replace(run, engine="on the GPU"))
    assert others[0]["losses"] == others[1]["losses"] == pytest.approx(result["losses"], abs=5e-3)


@pytest.mark.parametrize(
    ("hidden", "parameters"), list(zip(PUBLISHED_SIZES, PARAMETERS_WITHOUT_EMBEDDINGS, strict=True))
)
def test_the_setting_is_the_published_one(hidden: int, parameters: float) -> None:
    run = published_run("ours", "cuda", 4, hidden)
    model = run.model
    assert (model.layers, model.heads, model.kv_heads, model.vocabulary, model.sequence) == (32, 32, 8, 131_072, 2048)
    assert (run.steps, run.warm_up, run.batch, LR) == (1000, 100, 1, 5e-5)
    assert parameters_of(model) - 2 * model.vocabulary * hidden == pytest.approx(parameters, rel=0.11)
    assert [run.learning_rate(step) for step in (0, 49, 99, 999)] == pytest.approx([LR / 100, LR / 2, LR, LR])
    assert run.tokens_per_step == 4 * 2048
    assert Run.from_json(json.loads(json.dumps(run.as_json()))) == run


class Paced:
    """An engine whose first steps take ten seconds of the test's clock and all others one."""

    def __init__(self, clock: SimpleNamespace, slow: int) -> None:
        self.clock, self.left = clock, slow

    def step(self, tokens: Tensor, lr: float) -> Tensor:
        self.clock.now += 10.0 if self.left > 0 else 1.0
        self.left -= 1
        return torch.tensor(2.0)

    def close(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("steps", [12, 6])
def test_throughput_counts_from_step_six_on(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("benchmarks.gh200.published.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("benchmarks.gh200.published.dist.all_reduce", lambda tensor: tensor.mul_(3))
    run = replace(toy_run("ours", "cpu", 3, 32), steps=steps)
    batches: Any = SimpleNamespace(next=lambda: torch.zeros(1))
    device = torch.device("cpu")
    found = published._trained(run, Paced(clock, slow=5), batches, published.Memory(device), device)
    assert found["seconds_per_step"] == 1.0 and found["tokens_per_second"] == run.tokens_per_step
    assert found["losses"] == [2.0] * steps, "the mean over the ranks"


def test_tokens_are_two_bytes_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = SimpleNamespace(train=torch.arange(200, dtype=torch.uint8))
    monkeypatch.setattr(published, "load_corpus", lambda *_: corpus)
    monkeypatch.setattr("benchmarks.gh200.published.dist.get_rank", lambda: 0)
    run = replace(toy_run("ours", "cpu", 1, 32), model=published_run("ours", "cpu", 1, 2048).model)
    run = replace(run, model=replace(run.model, sequence=16))
    tokens = published.Batches(run, torch.device("cpu")).next()
    assert tokens.shape == (run.batch, 17)
    assert torch.equal(tokens >> 8, (tokens & 255) - 1), "neighbouring bytes"
    assert torch.equal(tokens[:, 1:] >> 8, (tokens[:, :-1] >> 8) + 2), "without gaps or repetition"


def canned_row(engine: str, ranks: int, hidden: int, speed: float | None) -> dict[str, Any]:
    run = toy_run(engine, "cuda", ranks, hidden).as_json()
    found: dict[str, Any] = {"out_of_memory": "too little"}
    if speed is not None:
        sizes = {f"{name}_{kind}_bytes": 2**30 for name in ("gpu", "host") for kind in ("peak", "average")}
        found = {"tokens_per_second": speed, "seconds_per_step": 1.0, "losses": [3.0, None, 2.5], **sizes}
    return {
        "key": f"{hidden}, {ranks}, {engine}",
        "status": "done",
        "settings": {"what": "published", "run": run},
        "result": found,
    }


def test_table_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'superoffload[demo]'")
    rows = [canned_row(engine, ranks, hidden, 100.0) for engine in ENGINES for ranks in (1, 4) for hidden in (32, 64)]
    rows.append(canned_row("on the GPU", 1, 128, None))
    lines = list(text(rows))
    assert len(lines) == 1 + len(rows) and "out of memory" in lines[-1]
    assert len(measured(rows)) == len(rows) - 1
    assert draw(rows, tmp_path / "plot.png") == [str(tmp_path / "plot.png")]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert draw(rows[-1:], tmp_path / "none.png") == [] and not (tmp_path / "none.png").exists()


def test_everything_is_in_the_list_and_can_be_started(tmp_path: Path) -> None:
    args = parse(["--out", str(tmp_path)])
    jobs = all_jobs(args, tmp_path, gpus=2)
    check_keys(jobs)
    by_key = {job.key: job for job in jobs}
    assert jobs[0].key == SMOKE and all(SMOKE in job.after for job in jobs[1:])
    assert by_key["hidden 2048, 2 ranks, ours"].absent is None
    assert all(float(job.environment[DEVICE_TIMEOUT]) < job.seconds for job in jobs)
    assert {job.settings["run"]["ranks"] for job in jobs if job.settings.get("what") == "published"} == {1, 2}
    assert {job.settings["run"]["model"]["hidden"] for job in jobs if "run" in job.settings} == set(PUBLISHED_SIZES)
    for job in jobs:
        if job.command[1:3] == ["-m", "superoffload"]:
            build_parser().parse_args(list(job.command[3:]))
        elif job.command[2] == "benchmarks.adam":
            parser_of("adam").parse_args(list(job.command[3:]))
    adam = by_key["adam on every number of cores"].command
    counts = adam[adam.index("--threads") + 1 : adam.index("--json")]
    assert list(map(int, counts)) == list(range(1, len(counts) + 1))
    four = all_jobs(parse(["--out", str(tmp_path), "--ranks", "4"]), tmp_path, gpus=2)
    assert {job.absent for job in four if job.key.endswith("4 ranks, ours")} == {"needs 4 GPUs, and there are 2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "add --toy"),
        (["--device", "cpu", "--toy", "--engines", "x"], "engines=x: expected some of"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_short_call_leaves_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(toy(tmp_path, "--only", "published", "--engines", "ours", "--time-limit", "0.01")) == LEFT
    assert "5 of 5 left" in capsys.readouterr().out
