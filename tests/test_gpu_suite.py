"""The GPU suite at toy size on a CPU: rows, resuming after a kill, targets, races that are found."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite import races, rows, targets
from benchmarks.gpu_suite.__main__ import NAME, main
from benchmarks.gpu_suite.contestants import ALL_ON_DEVICE, BARE, CONTESTANTS, OURS, OURS_CLIPPED, OURS_SYNCHRONOUS
from benchmarks.gpu_suite.devices import Device
from benchmarks.gpu_suite.pack_kernel import PackKernel
from benchmarks.gpu_suite.settings import FULL, TOY, TrainRow, parameters_of, train_row
from benchmarks.gpu_suite.table import table
from benchmarks.gpu_suite.training import build
from superoffload.benchmarking.jobs import LEFT, Job, check_keys
from superoffload.cuda import fallback, geometry
from superoffload.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]
PEER = "DeepSpeed ZeRO-Offload"
GPU_PEER = "DeepSpeed SuperOffload"


def suite(out: Path, *contestants: str) -> list[str]:
    return ["--device", "cpu", "--toy", "--out", str(out), "--contestants", *contestants]


def test_rows_at_toy_size_go_on_after_a_kill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = suite(tmp_path, OURS, GPU_PEER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_suite", *arguments], cwd=ROOT, env=environment)
    first = tmp_path / "rows" / "link.json"
    deadline = time.monotonic() + 120
    while not first.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = first.stat().st_mtime_ns
    assert main(arguments) == 0
    assert first.stat().st_mtime_ns == before, "what was measured is not measured again"
    report = json.loads((tmp_path / NAME).read_text())
    found = {row["key"]: row for row in report["rows"]}
    assert (
        report["left"] == []
        and report["gpu"] is None
        and report["machine"]["cpu"]
        and report["commit"]
        and report["versions"]["torch"]
    )
    assert found["link"]["result"]["down_gb_per_s"] > 0 and found["pack"]["result"]["cpu kernel_of_copy"] > 0
    assert found["adam"]["result"]["step_seconds_per_param"] > 0
    ours = found[f"64 tokens, {OURS}"]["result"]
    assert ours["stats"]["steps"] == TOY.warm_up + TOY.blocks * TOY.steps and ours["stats"]["clip_rate"] == 0
    assert ours["final_loss"] == ours["losses"][-1] == pytest.approx(5.5, abs=0.3)
    assert ours["parameters"] == parameters_of(TOY.model) and ours["host_peak_resident_bytes"] > 1 << 20
    peer = found[f"64 tokens, {GPU_PEER}"]
    assert (peer["status"], peer["error"]) == ("not here", "needs a GPU")
    printed = capfd.readouterr().out
    assert "needs a GPU" in printed and "not measured 64 tokens: ours, iteration over the bound" in printed
    assert f"64 tokens, {OURS}" in printed and "toy sizes" in printed


def in_process(contestant: str) -> dict[str, Any]:
    from benchmarks.gpu_suite.training import measure

    return measure(train_row(contestant, "cpu", TOY, 64, False))


def test_all_contestants_of_a_cpu_train_the_same_way() -> None:
    """The same loss from the same model and batches, and clipping that does what the row says."""
    results = {name: in_process(name) for name in (ALL_ON_DEVICE, OURS, OURS_CLIPPED, OURS_SYNCHRONOUS)}
    assert len({result["losses"][0] for result in results.values()}) == 1
    assert results[OURS]["losses"] == pytest.approx(results[ALL_ON_DEVICE]["losses"], abs=2e-3)
    assert results[OURS]["digests"] == results[OURS_SYNCHRONOUS]["digests"]
    assert results[OURS_CLIPPED]["digests"] != results[OURS]["digests"]
    assert [results[name]["stats"]["clip_rate"] for name in (OURS, OURS_CLIPPED)] == [0.0, 1.0]
    assert results[OURS_SYNCHRONOUS]["stats"]["buckets_speculated"] == 0 < results[OURS]["stats"]["buckets_speculated"]
    bare = in_process(BARE)
    assert bare["losses"][0] == results[OURS]["losses"][0] and "digests" not in bare


def test_a_peer_that_cannot_be_imported_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchao.py").write_text("raise OSError('libsomething.so: not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    result = in_process("torchao CPUOffloadOptimizer")
    assert result == {"missing": "torchao cannot be imported: OSError: libsomething.so: not found"}


def test_the_model_has_a_billion_parameters() -> None:
    assert 0.9e9 < parameters_of(FULL.model) < 1.1e9
    device = Device()
    assert parameters_of(TOY.model) == build(TOY.model, device, 0).parameter_count()


@pytest.mark.parametrize("tokens", FULL.tokens)
def test_tokens_per_step_are_what_was_asked_for(tokens: int) -> None:
    row = train_row(OURS, "cuda", FULL, tokens, False)
    assert row.tokens == tokens and row.batch * row.model.sequence <= FULL.micro_batch_tokens
    assert TrainRow.from_json(json.loads(json.dumps(row.as_json()))) == row
    if tokens in FULL.capped_tokens:
        capped = train_row(OURS, "cuda", FULL, tokens, True)
        assert capped.tokens == tokens and capped.capped_gib == FULL.capped_gib
        assert capped.batch * capped.model.sequence <= FULL.capped_micro_batch_tokens


def all_rows(device: str = "cuda") -> list[Job]:
    return rows.all_jobs(rows.Plan(device, FULL, races=True, tests=True))


def test_the_most_telling_rows_come_first() -> None:
    jobs = all_rows()
    check_keys(jobs)
    keys = [job.key for job in jobs]
    assert keys[:2] == ["link", "adam"]
    assert keys.index(f"8192 tokens, {OURS_CLIPPED}") < keys.index("tests") < keys.index(f"1024 tokens, {OURS}")
    assert all(f"{tokens} tokens, {name}" in keys for tokens in FULL.tokens for name in CONTESTANTS)
    assert all(f"{tokens} tokens, capped, {name}" in keys for tokens in FULL.capped_tokens for name in CONTESTANTS)
    assert any(job.environment == {"TORCH_CUDA_SANITIZER": "1"} for job in jobs)
    on_cpu = {job.key: job.absent for job in all_rows("cpu")}
    assert on_cpu["races, always, eager, sanitizer"] == "needs a GPU" and on_cpu["races, always, eager"] is None


# ---- targets from rows ----------------------------------------------------------------------------------------------


def machine_row(key: str, **result: Any) -> dict[str, Any]:
    return {"key": key, "status": "done", "settings": {"what": key}, "result": result}


def result_row(contestant: str, seconds: float | None, *, tokens: int = 8192, **more: Any) -> dict[str, Any]:
    """A billion parameters on a GPU that does not exist; seconds None: it ran out of memory."""
    times = {"seconds_median": seconds, "tokens_per_second": 1.0, "final_loss": 1.0, "host_peak_resident_bytes": 1}
    result = {"parameters": 10**9, "device": "imagined", "losses": [5.0], "digests": {"master": "a"}, **times, **more}
    return {
        "key": f"{tokens} tokens, {contestant}",
        "status": "done",
        "settings": {"what": "train", "contestant": contestant, "tokens": tokens, "capped_gib": None},
        "result": result if seconds is not None else {"out_of_memory": "too little"},
    }


MACHINE = [
    machine_row("link", down_gb_per_s=50.0, up_gb_per_s=40.0, both_gb_per_s=20.0, device="imagined"),
    machine_row("adam", step_seconds_per_param=0.2e-9, threads=16),
]


def judge(*training: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    found = [*MACHINE, *training]
    judged = targets.all_targets(found)
    text = table(found, judged)
    assert all(target.name in text for target in judged)
    return {target.name.partition(": ")[2]: (target.verdict, target.value) for target in judged}


def test_targets_are_computed_from_the_rows() -> None:
    """The bound is the largest of 0.1 s on the device, 0.2 s for a CPU pass and 0.05 s for the slower transfer."""
    memory = {"gpu_used_bytes": 100}
    verdicts = judge(
        result_row(BARE, 0.08),
        result_row(ALL_ON_DEVICE, 0.1),
        result_row(OURS, 0.22, gpu_used_bytes=104),
        result_row(OURS_CLIPPED, 0.24),
        result_row(OURS_SYNCHRONOUS, 0.3),
        result_row(PEER, 0.58, **memory),
        result_row(GPU_PEER, 0.48, gpu_used_bytes=200),
    )
    assert verdicts["ours, iteration over the bound"] == ("met", pytest.approx(1.1))
    assert verdicts["ours, every step clipped, iteration over the bound"] == ("missed", pytest.approx(1.2))
    assert verdicts["ours, exposed time over the best peer's"] == ("missed", pytest.approx(0.14 / 0.4))
    assert verdicts["ours, GPU memory over the leanest peer's"] == ("met", pytest.approx(1.04))
    assert verdicts["ours and ours, synchronous, parts of the state that differ"] == ("met", 0.0)


def test_what_was_not_measured_is_said_to_be_so() -> None:
    verdicts = judge(
        result_row(OURS, 0.22),
        result_row(ALL_ON_DEVICE, None),
        result_row(OURS_SYNCHRONOUS, 0.3, digests={"master": "b"}),
    )
    assert verdicts["ours, iteration over the bound"] == ("not measured", None)
    assert verdicts["ours, exposed time over the best peer's"] == ("not measured", None)
    assert verdicts["ours, GPU memory over the leanest peer's"] == ("not measured", None)
    assert verdicts["ours and ours, synchronous, parts of the state that differ"] == ("missed", 1.0)


def test_times_of_a_cpu_meet_no_target() -> None:
    verdicts = judge(result_row(ALL_ON_DEVICE, 0.1), result_row(OURS, 0.1, device="cpu"))
    assert verdicts["ours, iteration over the bound"] == ("not measured", pytest.approx(0.5))


# ---- packing --------------------------------------------------------------------------------------------------------


def test_the_pack_kernel_is_launched_as_it_wants_to_be() -> None:
    """Through the emulation of the kernels on this processor."""
    from tests import emulation

    library = ctypes.CDLL(str(emulation.library_path()))

    def launch(name: str, grid: int, arguments: Sequence[Any]) -> None:
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        library.emulate_launch(name.encode(), grid, geometry.THREADS, values)

    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.empty_like(gradient)
    kernel = PackKernel(gradient, packed, launch)
    kernel()
    expected = torch.empty_like(gradient)
    assert torch.equal(kernel.sums, fallback.pack(gradient, expected)) and torch.equal(packed, gradient)
    assert int(kernel.nonfinite) == 0
    gradient[4321] = math.inf
    kernel()
    assert int(kernel.nonfinite) == 1


# ---- races ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["always", "adaptive"])
def test_delays_change_no_bit(speculation: str) -> None:
    found = races.run_races("cpu", speculation, "eager", seeds=[1, 2], steps=6)
    assert found["different_seeds"] == [] and not found["sanitizer"]


def test_a_parameter_that_a_delay_keeps_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a delivery that comes after a delay is lost."""
    delayed: list[bool] = []
    delay, copy = Device.delay, torch._foreach_copy_

    def remembering(self: Device, generator: random.Random, stream: Any = None) -> None:
        delayed.append(True)
        delay(self, generator, stream)

    def losing(targets: Any, sources: Any) -> None:
        if not delayed:
            copy(targets, sources)
        delayed.clear()

    monkeypatch.setattr(Device, "delay", remembering)
    monkeypatch.setattr(torch, "_foreach_copy_", losing)
    found = races.run_races("cpu", "always", "eager", seeds=[1], steps=3)
    assert found["different_seeds"] == [1]


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "add --toy"),
        (["--device", "cpu", "--toy", "--contestants", "nobody"], "contestants=nobody: expected some of"),
        (["--device", "cpu", "--toy", "--tokens", "33"], "tokens=33: expected a multiple of 32"),
        (["--device", "cpu", "--toy", "--time-limit", "0"], "time_limit=0.0: expected a positive number"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_says_what_can_be_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert main(["--out", str(tmp_path)]) == 2
    assert "--device cpu --toy" in capsys.readouterr().err


def test_what_is_left_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*suite(tmp_path, OURS), "--list"]) == 0
    assert f"left: 64 tokens, {OURS}" in capsys.readouterr().out
    assert main([*suite(tmp_path, OURS), "--time-limit", "0.01"]) == LEFT


def test_no_memory_of_a_cpu_is_capped() -> None:
    with pytest.raises(ArgumentError, match="capped_gib=14: only a GPU's memory"):
        Device().cap(14.0)
