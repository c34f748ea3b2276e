"""The GPU suite at toy size on a CPU: contestants, what each slot measures, races, targets, arguments."""

from __future__ import annotations

import ast
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite import races, rows, targets, training
from benchmarks.gpu_suite.__main__ import main
from benchmarks.gpu_suite.contestants import (
    ALL_ON_DEVICE,
    BARE,
    CONTESTANTS,
    FSDP2_ON_DEVICE,
    OURS,
    OURS_CLIPPED,
    OURS_FSDP2,
    OURS_SYNCHRONOUS,
)
from benchmarks.gpu_suite.devices import Device
from benchmarks.gpu_suite.settings import FULL, TOY, TrainRow, parameters_of, train_row
from benchmarks.gpu_suite.table import short_table, table
from benchmarks.jobs import Job, check_keys, plain
from benchmarks.planned_and_published import HIDDEN_SIZES, PARAMETERS_WITHOUT_EMBEDDINGS
from benchmarks.results_file import write_results
from superoffload import _native
from superoffload.host.environment import DEVICE_TIMEOUT
from tests.support.checkout import ROOT

PEER, GPU_PEER = "DeepSpeed ZeRO-Offload", "DeepSpeed SuperOffload"
PUBLISHED = rows.PUBLISHED
OURS_HALF = "ours, 50 % clipped"


@pytest.fixture(autouse=True)
def no_rank_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contestants make this process the only rank of a run; Accelerate would take what follows for distributed."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---- contestants -----------------------------------------------------------------------------------------------------


def measured(contestant: str) -> dict[str, Any]:
    return training.measure(train_row(contestant, "cpu", TOY, 64, False))


def test_all_contestants_of_a_cpu_train_the_same_way() -> None:
    """The same loss from the same model and batches, and clipping that does what the row says."""
    names = (ALL_ON_DEVICE, OURS, OURS_CLIPPED, OURS_SYNCHRONOUS, OURS_HALF, OURS_FSDP2, BARE)
    results = {name: measured(name) for name in names}
    ours, stats = results[OURS], {name: results[name].get("stats", {}) for name in names}
    assert len({result["losses"][0] for result in results.values()}) == 1 and "digests" not in results[BARE]
    assert ours["losses"] == pytest.approx(results[ALL_ON_DEVICE]["losses"], abs=2e-3)
    assert ours["losses"] == pytest.approx(results[OURS_FSDP2]["losses"], abs=2e-3)
    assert ours["digests"] == results[OURS_SYNCHRONOUS]["digests"] != results[OURS_CLIPPED]["digests"]
    assert [stats[name]["clip_rate"] for name in (OURS, OURS_CLIPPED)] == [0.0, 1.0]
    assert results[OURS_HALF]["timed"]["clipped_steps"] == results[OURS_HALF]["timed"]["steps"] / 2
    assert stats[OURS_SYNCHRONOUS]["buckets_speculated"] == 0 < stats[OURS]["buckets_speculated"]
    assert stats[OURS]["steps"] == TOY.warm_up + TOY.blocks * TOY.steps


# ---- what each slot measures -----------------------------------------------------------------------------------------


def slot(name: str, device: str = "cuda") -> list[Job]:
    return rows.all_jobs(rows.Plan(device, FULL, slot=name))


def test_the_headline_comes_first_and_explanations_last(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = {name: slot(name) for name in ("first", "second", "third")}
    for jobs in slots.values():
        check_keys(jobs)
        assert jobs[0].key == rows.SMOKE and all(rows.SMOKE in job.after for job in jobs[1:])
        assert all(float(job.environment.get(DEVICE_TIMEOUT, "0")) < job.seconds for job in jobs)
    first, second, third = ([job.key for job in jobs] for jobs in slots.values())
    assert first[:4] == [rows.SMOKE, "link", "adam", "pack"]
    ours = {f"{tokens} tokens, {name}" for tokens in (8192, 32768) for name in (ALL_ON_DEVICE, OURS, OURS_CLIPPED)}
    assert ours < set(first[4:])
    peer = f"8192 tokens, {GPU_PEER}"
    order = [rows.TESTS, "races, always, eager", f"8192 tokens, {OURS}", rows.DEEPSPEED_KERNEL, peer]
    assert second[1] == rows.TESTS and sorted(order, key=second.index) == order
    assert {f"8192 tokens, {name}" for name in CONTESTANTS} < set(third) and "adam, by threads" in third
    monkeypatch.setattr("benchmarks.gpu_suite.contestants.find_spec", lambda name: None)
    absent = {job.key: job.absent for job in slot("second")}
    assert absent[peer] == absent[rows.DEEPSPEED_KERNEL] == "deepspeed is not installed"
    assert {job.key: job.absent for job in slot("third", "cpu")}["races, always, eager, sanitizer"] == "needs a GPU"


def test_the_superchip_slot_has_the_published_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    jobs = slot("superchip")
    check_keys(jobs)
    training_rows = [job for job in jobs if job.settings["what"] == "published"]
    assert [job.key for job in training_rows[:2]] == [f"hidden 2048, ranks: 1, {name}" for name in PUBLISHED[:2]]
    assert len(training_rows) == len(HIDDEN_SIZES) * 2 * len(PUBLISHED), "1 and 2 GPUs"
    ours = [job.settings for job in training_rows if PUBLISHED[0] in job.key]
    found = [TrainRow.from_json({name: value for name, value in one.items() if name != "what"}) for one in ours]
    sizes = {row.model.hidden: parameters_of(row.model) - 2 * row.model.vocabulary * row.model.hidden for row in found}
    assert sizes == pytest.approx(dict(zip(HIDDEN_SIZES, PARAMETERS_WITHOUT_EMBEDDINGS, strict=True)), rel=0.11)
    assert {(row.warm_up + row.blocks * row.steps, row.tokens) for row in found} == {(1000, 2048)}


@pytest.mark.in_turn
def test_two_ranks_train_the_published_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At toy size: as FSDP2 with torch's own optimizer does."""
    names = ["--contestants", OURS_FSDP2, FSDP2_ON_DEVICE, GPU_PEER]
    options = ["--device", "cpu", "--toy", "--slot", "superchip", "--ranks", "2", "--out", str(tmp_path), *names]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "hidden 32, ranks: 2" in printed and "needs a GPU" in printed
    rows_of = json.loads((tmp_path / "gpu_suite.json").read_text())["rows"]
    results = {row["key"]: row["result"] for row in rows_of if row["status"] == "done"}
    ours, theirs = (results[f"hidden 64, ranks: 2, {name}"] for name in (OURS_FSDP2, FSDP2_ON_DEVICE))
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=5e-3)
    assert ours["tokens_per_second"] == pytest.approx(2 * ours["tokens"] / ours["seconds_median"])


def test_what_a_row_is_made_from_is_in_its_sources() -> None:
    """What a source imports as it is loaded is a source too. A peer's row outlives a change of our optimizer."""
    jobs = {job.key: job for job in slot("second")}
    for job in jobs.values():
        assert all((ROOT / part).exists() for part in job.sources), job.key
        sources = {path for part in job.sources for path in [ROOT / part, *(ROOT / part).rglob("*.py")]}
        for path in sorted(path for path in sources if path.suffix == ".py"):
            assert imported_by(path) <= sources, f"{job.key}: {path.name}"
    assert {"superoffload", "csrc"} <= set(jobs[f"8192 tokens, {OURS}"].sources)
    assert not {"superoffload", "csrc"} & set(jobs[f"8192 tokens, {GPU_PEER}"].sources)


def imported_by(path: Path) -> set[Path]:
    """The modules of the suite and of the tests that are named at the top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = [name for name in names if name.startswith(("benchmarks.gpu_suite", "tests"))]
    return {path for name in ours if (path := ROOT / f"{name.replace('.', '/')}.py").is_file()}


# ---- races -----------------------------------------------------------------------------------------------------------


def test_a_parameter_that_a_delay_keeps_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays change no bit; with the planted fault a delivery that comes after a delay is lost."""
    assert races.run_races("cpu", "always", "eager", seeds=[1], steps=3)["different_seeds"] == []
    delayed: list[bool] = []
    delay, publish = Device.delay, _native.HostPieces.publish

    def remembering(self: Device, generator: random.Random, stream: Any = None) -> None:
        delayed.append(True)
        delay(self, generator, stream)

    def losing(pieces: Any, parameters: Any) -> None:
        if not delayed:
            publish(pieces, parameters)
        delayed.clear()

    monkeypatch.setattr(Device, "delay", remembering)
    monkeypatch.setattr(_native.HostPieces, "publish", losing)
    assert races.run_races("cpu", "always", "eager", seeds=[1], steps=3)["different_seeds"] == [1]
    assert not torch.are_deterministic_algorithms_enabled()


# ---- targets ---------------------------------------------------------------------------------------------------------


def result_row(contestant: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    """A billion parameters on a GPU that does not exist; seconds None: it ran out of memory."""
    result = {
        "parameters": 10**9,
        "bare_seconds": 0.08,
        "device": "imagined",
        "losses": [5.0],
        "digests": {"master": "a"},
        "seconds_median": seconds,
        "tokens_per_second": 1.0,
        "final_loss": 1.0,
        "host_peak_resident_bytes": 1,
    }
    return {
        "key": f"8192 tokens, {contestant}",
        "status": "done",
        "settings": {"what": "train", "contestant": contestant, "tokens": 8192, "capped_gib": None},
        "result": {**result, **more} if seconds is not None else {"out_of_memory": "too little"},
    }


def judge(*trained: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """The bound is the largest of 0.1 s on the device, 0.2 s for a CPU pass and 0.05 s for the slower transfer."""
    link = {"down_gb_per_s": 50.0, "up_gb_per_s": 40.0, "both_gb_per_s": 20.0, "device": "imagined"}
    machine = [
        {"key": key, "status": "done", "settings": {"what": key}, "result": result}
        for key, result in (("link", link), ("adam", {"step_seconds_per_param": 0.2e-9, "threads": 16}))
    ]
    judged = targets.all_targets([*machine, *trained])
    text = table([*machine, *trained], judged)
    assert all(target.name in text for target in judged)
    assert len(short_table([*machine, *trained], judged).encode()) < 4096
    return {target.name.partition(": ")[2]: (target.verdict, target.value) for target in judged}


def test_targets_are_computed_from_the_rows() -> None:
    verdicts = judge(
        result_row(BARE, 0.08),
        result_row(ALL_ON_DEVICE, 0.1),
        result_row(OURS, 0.22, gpu_used_bytes=104),
        result_row(OURS_CLIPPED, 0.24),
        result_row(OURS_SYNCHRONOUS, 0.3, digests={"master": "b"}),
        result_row(PEER, 0.58, gpu_used_bytes=100),
        result_row(GPU_PEER, 0.48, gpu_used_bytes=200),
    )
    assert verdicts["ours, iteration over the bound"] == ("met", pytest.approx(1.1))
    assert verdicts["ours, every step clipped, iteration over the bound"] == ("missed", pytest.approx(1.2))
    assert verdicts["ours, exposed time over the best peer's"] == ("missed", pytest.approx(0.14 / 0.4))
    assert verdicts["ours, GPU memory over the leanest peer's"] == ("met", pytest.approx(1.04))
    assert verdicts["ours and ours, synchronous, parts of the state that differ"] == ("missed", 1.0)
    missing = judge(result_row(OURS, 0.22), result_row(ALL_ON_DEVICE, None))
    assert set(missing.values()) == {("not measured", None)}
    on_cpu = judge(result_row(ALL_ON_DEVICE, 0.1), result_row(OURS, 0.1, device="cpu"))
    assert on_cpu["ours, iteration over the bound"] == ("not measured", pytest.approx(0.5))


def test_what_counts_as_a_failure() -> None:
    """A race that did not end is none that was won, and only a peer's failure is forgiven."""
    for status in ("failed", "timed out"):
        row = {"key": "races", "status": status, "settings": {"what": "races"}, "error": "exit status -11"}
        (target,) = targets.all_targets([row])
        assert target.verdict == "missed" and targets.is_wrong(row) and "-11" in short_table([row], [target])
        assert targets.is_wrong({**row, "status": "done", "result": {"different_seeds": [3], "seeds": [1, 3]}})
        for name in (OURS, BARE, GPU_PEER):
            failed = {**result_row(name, 0.1), "status": status, "error": "exit status 1"}
            assert targets.is_wrong(failed) is (name != GPU_PEER)
            assert targets.is_wrong(result_row(name, None)) is (name == OURS), "elsewhere out of memory is a result"
            assert targets.is_wrong(plain(result_row(name, 0.1, final_loss=math.nan))) is (name == OURS)


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--device cpu", "add --toy"),
        ("--device cpu --toy --contestants no-such", "contestants=no-such: expected some of"),
        ("--device cpu --toy --tokens 33", "tokens=33: expected a multiple of 32"),
        ("--device cpu --toy --time-limit 0", "time_limit=0.0: expected a positive number"),
        ("--device cpu --toy --ranks 2", "ranks=[2]: expected numbers of GPUs from 1 on, with --slot superchip"),
        ("--device cpu --toy --slot superchip --ranks 0", "ranks=[0]: expected numbers of GPUs from 1 on"),
        ("--device cpu --toy --slot superchip --tokens 64", "slot=superchip: its rows have tokens"),
        ("--device cpu --toy --slot superchip --contestants ours", "contestants=ours: expected some of ours, FSDP2, "),
    ],
)
def test_bad_arguments(arguments: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), *arguments.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a file", "a link", "a pipe"])
def test_results_are_written_where_they_are_wanted(place: str, tmp_path: Path) -> None:
    path, target = tmp_path / "found.json", tmp_path / "target"
    target.write_text("old")
    if place == "a link":
        path.symlink_to(target)
    if place == "a pipe":
        os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if place == "a pipe" else None
    write_results(path, {"rows": [{"a": 1}, {"a": 2}]})
    text = path.read_text() if reading is None else os.read(reading, 1000).decode()
    assert json.loads(text) == {"rows": [{"a": 1}, {"a": 2}]} and text.count("\n") == 6
    assert path.is_symlink() == (place == "a link") and path.is_fifo() == (place == "a pipe")
    assert {each.name for each in tmp_path.iterdir()} == {"found.json", "target"}
    if reading is not None:
        os.close(reading)
