"""The GPU suite's rows at toy size on a CPU: contestants, what each slot measures, races that are found, arguments."""

from __future__ import annotations

import ast
import ctypes
import gzip
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite import races, rows, training
from benchmarks.gpu_suite.__main__ import NAME, main
from benchmarks.gpu_suite.contestants import (
    ALL_ON_DEVICE,
    BARE,
    CONTESTANTS,
    FILES_VARIABLE,
    OURS,
    OURS_CLIPPED,
    OURS_FSDP2,
    OURS_SYNCHRONOUS,
    Setting,
)
from benchmarks.gpu_suite.devices import Device
from benchmarks.gpu_suite.launches import THREADS
from benchmarks.gpu_suite.pack_kernel import PackKernel
from benchmarks.gpu_suite.settings import ALWAYS_CLIPS, FULL, TOY, TrainRow, parameters_of, train_row
from benchmarks.gpu_suite.training import build
from benchmarks.jobs import ENDS_VARIABLE, LEFT, Job, check_keys
from superoffload import _native
from superoffload.errors import ArgumentError
from superoffload.host.environment import DEVICE_TIMEOUT
from tests.support import numpy_kernels
from tests.support.checkout import ROOT
from tests.support.fake_cuda_training import out_of_memory

GPU_PEER = "DeepSpeed SuperOffload"
OURS_HALF, OURS_EAGER = "ours, 50 % clipped", "ours, eager"


@pytest.fixture(autouse=True)
def no_rank_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contestants make this process the only rank of a run; Accelerate would take what follows for distributed."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def suite(out: Path, *contestants: str) -> list[str]:
    return ["--device", "cpu", "--toy", "--without-tests", "--out", str(out), "--contestants", *contestants]


def test_rows_of_contestants_that_were_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(suite(tmp_path, OURS, GPU_PEER)) == 0
    report = json.loads((tmp_path / NAME).read_text())
    found = {row["key"]: row for row in report["rows"]}
    assert report["left"] == [] and report["gpu"] is None and report["machine"]["cpu"] and report["versions"]["torch"]
    assert ours_link(found) == {"pinned": None, "uses_flag": None}
    assert found["smoke"]["result"]["wrong"] == [] and set(found["smoke"]["result"]["ways"]) == {"flag", "event"}
    ours = found[f"64 tokens, {OURS}"]["result"]
    assert ours["stats"]["steps"] == TOY.warm_up + TOY.blocks * TOY.steps and ours["stats"]["clip_rate"] == 0
    assert ours["timed"]["steps"] == TOY.blocks * TOY.steps
    assert ours["final_loss"] == ours["losses"][-1] == pytest.approx(5.5, abs=0.3)
    assert ours["parameters"] == parameters_of(TOY.model) and ours["host_peak_resident_bytes"] > 1 << 20
    peer = found[f"64 tokens, {GPU_PEER}"]
    assert (peer["status"], peer["error"]) == ("not here", "needs a GPU")
    printed = capfd.readouterr().out
    assert "needs a GPU" in printed and "smoke: ok, arrivals by event and event" in printed
    assert f"64 tokens, {OURS}" in printed and "toy sizes" in printed


def ours_link(found: dict[str, Any]) -> Any:
    return found[f"64 tokens, {OURS}"]["result"]["link"]


def in_process(contestant: str) -> dict[str, Any]:
    from benchmarks.gpu_suite.training import measure

    return measure(train_row(contestant, "cpu", TOY, 64, False))


def test_all_contestants_of_a_cpu_train_the_same_way() -> None:
    """The same loss from the same model and batches, and clipping that does what the row says."""
    names = (ALL_ON_DEVICE, OURS, OURS_CLIPPED, OURS_SYNCHRONOUS, OURS_HALF, OURS_EAGER, OURS_FSDP2)
    results = {name: in_process(name) for name in names}
    assert len({result["losses"][0] for result in results.values()}) == 1
    assert results[OURS]["losses"] == pytest.approx(results[ALL_ON_DEVICE]["losses"], abs=2e-3)
    assert results[OURS]["digests"] == results[OURS_SYNCHRONOUS]["digests"]
    assert results[OURS_CLIPPED]["digests"] != results[OURS]["digests"]
    assert [results[name]["stats"]["clip_rate"] for name in (OURS, OURS_CLIPPED)] == [0.0, 1.0]
    assert results[OURS_EAGER]["digests"] == results[OURS]["digests"]
    assert results[OURS_FSDP2]["losses"] == pytest.approx(results[OURS]["losses"], abs=2e-3)
    assert results[OURS_HALF]["timed"]["clipped_steps"] == results[OURS_HALF]["timed"]["steps"] / 2
    assert results[OURS_SYNCHRONOUS]["stats"]["buckets_speculated"] == 0 < results[OURS]["stats"]["buckets_speculated"]
    bare = in_process(BARE)
    assert bare["losses"][0] == results[OURS]["losses"][0] and "digests" not in bare


@pytest.mark.parametrize(("clipped", "thresholds"), [(0.0, 0), (0.1, 2), (0.5, 10), (1.0, 20)])
def test_clipped_steps_are_spread_evenly(clipped: float, thresholds: int) -> None:
    setting = Setting(clipped=clipped)
    clips = [setting.threshold(step) == ALWAYS_CLIPS for step in range(20)]
    assert sum(clips) == thresholds == 2 * sum(clips[:10])


def test_a_timeline_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILES_VARIABLE, str(tmp_path))
    in_process("ours, traced")
    (path,) = tmp_path.iterdir()
    assert path.name == "timeline.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))
    assert any(event.get("name", "").startswith("bucket 0 speculate") for event in events)


def test_deepspeed_compiles_its_kernel_before_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = slot("second")
    keys = [job.key for job in jobs]
    peer = jobs[keys.index(f"8192 tokens, {GPU_PEER}")]
    assert rows.DEEPSPEED_KERNEL in peer.after and keys.index(rows.DEEPSPEED_KERNEL) == keys.index(peer.key) - 1
    monkeypatch.setattr("benchmarks.gpu_suite.contestants.find_spec", lambda name: None)
    absent = {job.key: job.absent for job in slot("second")}
    assert absent[peer.key] == absent[rows.DEEPSPEED_KERNEL] == "deepspeed is not installed"


def test_a_row_that_takes_long_has_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDS_VARIABLE, "0.001")
    row = replace(train_row(OURS, "cpu", TOY, 64, False), blocks=4)
    assert len(training.measure(row)["seconds"]) == 2
    monkeypatch.setenv(ENDS_VARIABLE, "1e9")
    assert len(training.measure(row)["seconds"]) == 4


@pytest.mark.parametrize("of_allocator", [True, False])
def test_what_went_wrong_first_is_what_a_row_tells(monkeypatch: pytest.MonkeyPatch, of_allocator: bool) -> None:
    error = out_of_memory(of_allocator)

    def fails(*_: Any) -> Any:
        raise error

    def close(*_: Any) -> None:
        raise RuntimeError("cannot be closed after that")

    monkeypatch.setattr(training, "_timed", fails)
    monkeypatch.setattr("benchmarks.gpu_suite.contestants.Plain.close", close)
    assert in_process(ALL_ON_DEVICE)["out_of_memory"] == str(error)


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


@pytest.mark.parametrize("tokens", [*FULL.tokens, *FULL.more_tokens])
def test_tokens_per_step_are_what_was_asked_for(tokens: int) -> None:
    row = train_row(OURS, "cuda", FULL, tokens, False)
    assert row.tokens == tokens and row.batch * row.model.sequence <= FULL.micro_batch_tokens
    assert TrainRow.from_json(json.loads(json.dumps(row.as_json()))) == row
    if tokens in FULL.capped_tokens:
        capped = train_row(OURS, "cuda", FULL, tokens, True)
        assert capped.tokens == tokens and capped.capped_gib == FULL.capped_gib
        assert capped.batch * capped.model.sequence <= FULL.capped_micro_batch_tokens


def slot(name: str, device: str = "cuda") -> list[Job]:
    return rows.all_jobs(rows.Plan(device, FULL, slot=name))


def test_the_headline_comes_first_and_explanations_last() -> None:
    first, second, third = (slot(name) for name in ("first", "second", "third"))
    for jobs in (first, second, third):
        check_keys(jobs)
        assert jobs[0].key == rows.SMOKE and all(rows.SMOKE in job.after for job in jobs[1:])
        for job in jobs:
            timeout = float(job.environment.get(DEVICE_TIMEOUT, "0"))
            assert timeout < job.seconds and (timeout or not job.key.startswith(("smoke", "tests", "races", "8192")))
    assert [job.key for job in first[:4]] == [rows.SMOKE, "link", "adam", "pack"]
    ours = {f"{tokens} tokens, {name}" for tokens in (8192, 32768) for name in (ALL_ON_DEVICE, OURS, OURS_CLIPPED)}
    assert ours < {job.key for job in first[4:]}
    keys = [job.key for job in second]
    order = [rows.TESTS, "races, always, eager", f"8192 tokens, {OURS}", f"8192 tokens, {GPU_PEER}"]
    assert keys[1] == rows.TESTS and sorted(order, key=keys.index) == order
    assert sum(key.startswith("races") for key in keys) == 2
    assert {f"8192 tokens, {name}" for name, entry in CONTESTANTS.items() if entry.kind == "peer"} < set(keys)


def test_the_third_slot_measures_the_rest() -> None:
    third = slot("third")
    keys = {job.key for job in third}
    for name in CONTESTANTS:
        assert {f"8192 tokens, {name}", f"32768 tokens, {name}"} < keys
    assert {f"8192 tokens, ours, {count} threads" for count in (8, 12, 14, 16)} < keys and "adam, by threads" in keys
    swept = {job.settings["tokens"] for job in third if job.settings["what"] == "train"}
    assert swept == {*FULL.tokens, *FULL.more_tokens}
    assert any(job.environment.get("TORCH_CUDA_SANITIZER") == "1" for job in third)
    assert any(job.settings.get("ranks") == 2 for job in third)
    on_cpu = {job.key: job.absent for job in slot("third", "cpu")}
    assert (
        on_cpu["races, always, eager, sanitizer"] == "needs a GPU" and on_cpu["races, always, eager, 2 ranks"] is None
    )


def test_a_peers_row_outlives_a_change_of_our_optimizer() -> None:
    by_key = {job.key: job for job in slot("second")}
    assert "superoffload" in by_key[f"8192 tokens, {OURS}"].sources and "csrc" in by_key[rows.SMOKE].sources
    assert not {"superoffload", "csrc"} & set(by_key[f"8192 tokens, {GPU_PEER}"].sources)
    of_the_tests = {"tests/gpu", "tests/support/device_battery.py", "tests/support/kernel_battery.json"}
    assert of_the_tests < set(by_key[rows.TESTS].sources)
    for job in by_key.values():
        assert all((ROOT / part).exists() for part in job.sources), job.key


def test_what_a_row_is_made_from_is_in_its_sources() -> None:
    """What a source imports as it is loaded is a source too; what it imports later is not used in every place."""
    for job in slot("second"):
        sources = {path for part in job.sources for path in [ROOT / part, *(ROOT / part).rglob("*.py")]}
        for path in sorted(path for path in sources if path.suffix == ".py"):
            assert imported_by(path) <= sources, f"{job.key}: {path.name}"


def imported_by(path: Path) -> set[Path]:
    """The modules of the suite and of the tests that are named at the top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = [name for name in names if name.startswith(("benchmarks.gpu_suite", "tests"))]
    return {path for name in ours if (path := ROOT / f"{name.replace('.', '/')}.py").is_file()}


# ---- packing --------------------------------------------------------------------------------------------------------


def test_the_pack_kernel_is_launched_as_it_wants_to_be() -> None:
    """Through the emulation of the kernels on this processor."""

    from tests.support import emulated_kernels

    library = ctypes.CDLL(str(emulated_kernels.library_path()))

    def launch(name: str, grid: int, arguments: Sequence[Any]) -> None:
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        library.emulate_launch(name.encode(), grid, THREADS, values)

    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.empty_like(gradient)
    kernel = PackKernel(gradient, packed, launch)
    kernel()
    expected = torch.from_numpy(numpy_kernels.sum_of_squares(gradient.float().numpy()))
    assert torch.equal(kernel.sums, expected) and torch.equal(packed, gradient)
    gradient[4321] = math.inf
    kernel()
    assert kernel.sums.isinf().tolist() == [False, False, False, False, True]


# ---- races ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["always", "adaptive"])
def test_delays_change_no_bit(speculation: str) -> None:
    found = races.run_races("cpu", speculation, "eager", seeds=[1, 2], steps=6)
    assert found["different_seeds"] == [] and not found["sanitizer"]


def test_a_parameter_that_a_delay_keeps_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a delivery that comes after a delay is lost."""
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
    found = races.run_races("cpu", "always", "eager", seeds=[1], steps=3)
    assert found["different_seeds"] == [1]


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "add --toy"),
        (["--device", "cpu", "--toy", "--capped"], "capped: expected --contestants or --tokens"),
        (["--device", "cpu", "--toy", "--plot", "rows.png"], "plot=rows.png: expected --report"),
        (["--device", "cpu", "--toy", "--contestants", "no-such"], "contestants=no-such: expected some of"),
        (["--device", "stand-in"], "add --toy"),
        (["--device", "cpu", "--toy", "--resume", "no.json"], "resume=no.json: expected the JSON of an earlier call"),
        (["--device", "cpu", "--toy", "--row-limit", "-1"], "row_limit=-1.0: expected a positive number"),
        (["--device", "cpu", "--toy", "--tokens", "33"], "tokens=33: expected a multiple of 32"),
        (["--device", "cpu", "--toy", "--time-limit", "0"], "time_limit=0.0: expected a positive number"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_what_is_left_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*suite(tmp_path, OURS), "--list"]) == 0
    assert f"left: 64 tokens, {OURS}" in capsys.readouterr().out
    assert main([*suite(tmp_path, OURS), "--time-limit", "0.01"]) == LEFT


def test_no_memory_of_a_cpu_is_capped() -> None:
    with pytest.raises(ArgumentError, match="capped_gib=14: only a GPU's memory"):
        Device().cap(14.0)


def test_a_race_that_fails_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(races, "_train", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        races.run_races("cpu", "always", "eager", [0])
    assert not torch.are_deterministic_algorithms_enabled()
