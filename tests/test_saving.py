"""superoffload.checkpoints in one process: resumed to the bit, whole or not at all, refused by name when damaged."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.safetensors import Entry, TensorFile, TensorReader
from superoffload.errors import ArgumentError, StateError
from tests.adamw_tools import DTYPES, batch, model_of, train
from tests.compatibility import compat


class Tied(nn.Module):
    """Tied ends, a buffer that forward changes, a frozen layer, a scalar, something empty, extra state, dropout."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.scale * self.norm(self.embedding(tokens)) + self.frozen.weight.sum() + self.empty.sum()
        loss: Tensor = nn.functional.cross_entropy(self.head(nn.functional.dropout(x, 0.2)), (tokens + 1) % 11)
        return loss


class Run:
    """A model, its optimizer and scheduler, and a loop over both that can stop anywhere."""

    def __init__(self, seed: int, dtype: torch.dtype, mode: str = "always", **options: Any) -> None:
        self.model = Tied(seed).to(dtype)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "tag": "rest"}]
        self.optimizer = AdamW(groups, lr=1e-2, max_grad_norm=3.0, speculation=mode, threads=1, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        torch.manual_seed(seed)

    def backward(self, step: int) -> Tensor:
        tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        loss: Tensor = self.model(tokens)
        loss.backward()
        return loss.detach()

    def steps(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            losses.append(self.backward(step).item())
            losses[-1] += self.backward(100 + step).item()  # accumulates
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state()}

    def resume(self, folder: Path) -> None:
        extra = checkpoints.load(folder, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])

    def everything(self) -> tuple[dict[str, str], list[Tensor], Any]:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return self.optimizer.state_digests(), buffers, (self.model.calls, self.scheduler.get_last_lr())


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0] and ours[2] == theirs[2]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@compat("save, kill, resume: the same losses and bits as a run never stopped", "single")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("dtype", "state"), [(d, "fp32") for d in DTYPES] + [(torch.bfloat16, "bf16")])
def test_resume_is_bit_exact(dtype: torch.dtype, state: str, background: bool, tmp_path: Path) -> None:
    straight = Run(0, dtype, state_dtype=state)
    losses, at = [], (0, 1, 4)
    for step in range(7):
        if step in at and background:
            checkpoints.save_in_background(
                tmp_path / f"step-{step}", straight.model, straight.optimizer, extra=straight.extra()
            )
        elif step in at:
            checkpoints.save(tmp_path / f"step-{step}", straight.model, straight.optimizer, extra=straight.extra())
        losses += straight.steps(range(step, step + 1))
    straight.optimizer.end_snapshot()
    for step in at:
        other = Run(5, dtype, "never", state_dtype=state)
        other.steps(range(50, 53))
        wait_for(tmp_path / f"step-{step}")
        other.resume(tmp_path / f"step-{step}")
        assert other.steps(range(step, 7)) == losses[step:]
        assert_same(other.everything(), straight.everything())
        other.optimizer.close()
    straight.optimizer.close()


def wait_for(folder: Path) -> None:
    deadline = threading.Event()
    for _ in range(3000):
        if (folder / "manifest.json").exists():
            return
        deadline.wait(0.01)
    raise AssertionError(f"{folder} was not written within 30 s")


@compat("a checkpoint in the middle of an accumulation window: that of the last finished step", "single")
@pytest.mark.parametrize("background", [False, True])
def test_saved_in_the_middle_of_a_window(background: bool, tmp_path: Path) -> None:
    """What is saved is the last finished step; after a resume the window is run again from its beginning."""
    run = Run(0, torch.bfloat16)
    run.steps(range(3))
    calls, rng, lr = run.model.calls, torch.get_rng_state(), run.scheduler.state_dict()
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    run.optimizer.zero_grad()
    run.backward(3)  # speculated; the second half of the window is still to come
    extra = {"scheduler": lr, "rng": rng}
    if background:
        checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer, extra=extra).wait()
    else:
        checkpoints.save(tmp_path / "a", run.model, run.optimizer, extra=extra)
    run.backward(103)
    run.optimizer.step()
    run.scheduler.step()
    run.steps(range(4, 6))
    other = Run(1, torch.bfloat16)
    other.resume(tmp_path / "a")
    other.model.calls = calls  # what forward itself changes is that of the moment
    for mine, theirs in zip(other.model.buffers(), buffers, strict=True):
        mine.copy_(theirs)
    other.steps(range(3, 6))
    assert_same(other.everything(), run.everything())
    run.optimizer.close()
    other.optimizer.close()


class HeldUp:
    """Lets the writing thread write an entry only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        write = TensorFile.write

        def held_up(file: TensorFile, name: str, runs: Any) -> None:
            self.began.set()
            assert self.go.wait(60)
            write(file, name, runs)

        monkeypatch.setattr(TensorFile, "write", held_up)


@compat("saved in the background while training goes on", "single")
@pytest.mark.parametrize("mode", ["always", "never"])
def test_training_goes_on_while_a_checkpoint_is_written(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(0, torch.bfloat16, mode)
    run.steps(range(2))
    at_save, saved = run.everything(), run.extra()
    held = HeldUp(monkeypatch)
    saving = checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer, extra=saved)
    run.steps(range(2, 5))  # several steps, and nothing was written yet
    assert not saving.done and held.began.is_set()
    with pytest.raises(StateError, match="not written after"):
        saving.wait(0.01)
    held.go.set()
    assert saving.wait(60) == tmp_path / "a"
    state = sum(3 * 4 * p.numel() for p in run.model.parameters() if p.requires_grad)
    assert 0 < saving.largest_extra_bytes <= state
    other = Run(1, torch.bfloat16)
    other.resume(tmp_path / "a")
    assert_same(other.everything(), at_save)
    run.optimizer.close()
    other.optimizer.close()


def test_without_memory_for_copies_a_step_waits_for_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(0, torch.float32)
    run.steps(range(2))
    at_save, saved = run.everything(), run.extra()
    held = HeldUp(monkeypatch)
    saving = checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer, extra=saved, memory=0)
    assert held.began.wait(60)
    finished = threading.Event()

    def let_go() -> None:
        if not finished.is_set():
            held.go.set()

    timer = threading.Timer(0.5, let_go)
    timer.start()
    run.steps(range(2, 4))
    waited = held.go.is_set()  # the timer, and nothing else, has let the step go on
    finished.set()
    timer.join()
    assert waited and saving.wait(60) and saving.largest_extra_bytes == 0
    other = Run(1, torch.float32)
    other.resume(tmp_path / "a")
    assert_same(other.everything(), at_save)
    for one in (run, other):
        one.optimizer.close()


def test_a_second_checkpoint_waits_for_the_first_one(tmp_path: Path) -> None:
    run = Run(0, torch.float32)
    savings = []
    for step in range(4):
        run.steps(range(step, step + 1))
        name = tmp_path / f"step-{step}"
        savings.append(checkpoints.save_in_background(name, run.model, run.optimizer, extra=run.extra(), keep=2))
    for saving in savings:
        saving.wait(60)
    assert [path.name for path in folders.finished(tmp_path)] == ["step-2", "step-3"]
    run.optimizer.close()


def test_a_frozen_parameter_written_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(0, torch.float32)
    held = HeldUp(monkeypatch)
    saving = checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer)
    with torch.no_grad():
        run.model.frozen.weight.add_(1.0)
    held.go.set()
    with pytest.raises(StateError, match=r"frozen.weight: written to while it was saved"):
        saving.wait(60)
    assert list(tmp_path.iterdir()) == []
    run.optimizer.close()


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(0, torch.float32)
    run.steps(range(2))
    checkpoints.save(tmp_path / "step-2", run.model, run.optimizer, extra=run.extra())
    before = run.everything()
    run.steps(range(2, 3))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(tmp_path / "step-3", run.model, run.optimizer)
        saving = checkpoints.save_in_background(tmp_path / "step-3", run.model, run.optimizer)
        run.steps(range(3, 5))  # does not wait for what will not come
        with pytest.raises(OSError, match="No space left"):
            saving.wait(60)
        assert "step-3 was not saved: [Errno 28] No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    other = Run(3, torch.float32)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    other.resume(found)
    assert_same(other.everything(), before)
    for one in (run, other):
        one.optimizer.close()


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def in_its_place(path: Path) -> None:
    """Another safetensors file of the same size."""
    file = TensorFile(path.with_name("x"), [Entry("a", torch.uint8, (path.stat().st_size - 128,))], {})
    file.write("a", [torch.zeros(path.stat().st_size - 128, dtype=torch.uint8)])
    file.finish()
    os.replace(file.path, path)
    os.truncate(path, path.stat().st_size)


TENSORS = "rank-00000.safetensors"
DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "truncated tensors": (TENSORS, truncate),
    "flipped bit in the header": (TENSORS, lambda path: flip(path, 0.02)),
    "flipped bit in a tensor": (TENSORS, lambda path: flip(path, 0.6)),
    "flipped last byte": (TENSORS, lambda path: flip(path, 1.0)),
    "another file": (TENSORS, in_its_place),
    "tensors gone": (TENSORS, os.remove),
    "truncated state": ("state.pt", truncate),
    "flipped bit in the state": ("state.pt", lambda path: flip(path, 0.5)),
    "state gone": ("state.pt", os.remove),
    "truncated manifest": ("manifest.json", truncate),
    "flipped bit in the manifest": ("manifest.json", lambda path: flip(path, 0.5)),
    "manifest gone": ("manifest.json", os.remove),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-2"
    run = Run(0, torch.bfloat16)
    run.steps(range(2))
    checkpoints.save(folder, run.model, run.optimizer, extra=run.extra())
    run.optimizer.close()
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@compat("a truncated, bit-flipped or foreign checkpoint", "single", note="refused with the file's name")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str, saved: Path, tmp_path: Path) -> None:
    name, harm = DAMAGE[damage]
    folder = copy_of(saved, tmp_path / "step-2")
    harm(folder / name)
    run = Run(3, torch.bfloat16)
    run.steps(range(1))
    before = run.everything()
    with pytest.raises(ArgumentError) as caught:
        checkpoints.load(folder, run.model, run.optimizer)
    assert name in str(caught.value) and str(folder) in str(caught.value)
    assert_same(run.everything(), before)
    run.optimizer.close()


def test_latest_passes_over_what_is_not_whole(saved: Path, tmp_path: Path) -> None:
    for step in (2, 10, 9):
        copy_of(saved, tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()
    copy_of(saved, tmp_path / ".writing-step-12-abc")
    truncate(copy_of(saved, tmp_path / "step-20") / TENSORS)
    truncate(copy_of(saved, tmp_path / "step-30") / "manifest.json")
    assert checkpoints.latest(tmp_path) == tmp_path / "step-10"
    nowhere = checkpoints.latest(tmp_path / "nowhere")
    assert nowhere is None
    with pytest.raises(ArgumentError, match=r"latest\(\) gives None"):
        checkpoints.load(nowhere, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/superoffload-must-not-exist",)


def test_code_in_a_checkpoint_does_not_run(saved: Path, tmp_path: Path) -> None:
    """Even where somebody has made manifest and checksums fit."""
    folder = copy_of(saved, tmp_path / "evil")
    data = pickle.dumps({"extra": Evil()})
    (folder / "state.pt").write_bytes(data)
    manifest = folders.read_manifest(folder)
    import hashlib

    manifest["files"]["state.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del manifest["format"], manifest["version"]
    (folder / "manifest.json").write_bytes(folders.manifest_text(manifest))
    run = Run(3, torch.bfloat16)
    with pytest.raises(ArgumentError, match="cannot be read safely"):
        checkpoints.load(folder, run.model, run.optimizer)
    assert not os.path.exists("/tmp/superoffload-must-not-exist")
    run.optimizer.close()


def test_what_cannot_be_read_back_safely_is_not_saved(tmp_path: Path) -> None:
    run = Run(0, torch.float32)
    for extra in ({"x": Evil()}, {"x": lambda: 0}, [1]):
        with pytest.raises(ArgumentError, match="extra"):
            checkpoints.save(tmp_path / "a", run.model, run.optimizer, extra=extra)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    run.optimizer.close()


def other_model() -> tuple[nn.Module, Any]:
    model = model_of()
    return model, AdamW(model.parameters(), threads=1)


def other_shape() -> tuple[nn.Module, Any]:
    run = Run(0, torch.bfloat16)
    run.model.norm.running_mean = torch.zeros(9, dtype=torch.bfloat16)
    return run.model, run.optimizer


def other_dtype() -> tuple[nn.Module, Any]:
    run = Run(0, torch.float32)
    return run.model, run.optimizer


def other_groups() -> tuple[nn.Module, Any]:
    model = Tied().bfloat16()
    return model, AdamW(model.parameters(), threads=1)


def other_optimizer() -> tuple[nn.Module, Any]:
    model = Tied().bfloat16()
    return model, torch.optim.SGD(model.parameters())


def foreign_parameters() -> tuple[nn.Module, Any]:
    return Tied().bfloat16(), AdamW(model_of().parameters(), threads=1)


MISFITS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "another model": (other_model, "the model lacks"),
    "another shape": (other_shape, "norm.running_mean has shape (8,), expected (9,)"),
    "another dtype": (other_dtype, "expected torch.float32; convert the model"),
    "other groups": (other_groups, "param group 0 differs"),
    "another optimizer": (other_optimizer, "SGD, expected superoffload.AdamW or torch.optim.AdamW"),
    "parameters of another model": (foreign_parameters, "parameter 0 of group 0 is none of model's"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name: str, saved: Path) -> None:
    make, words = MISFITS[name]
    model, optimizer = make()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ArgumentError) as caught:
        checkpoints.load(saved, model, optimizer)
    assert words in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if isinstance(optimizer, AdamW):
        optimizer.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"keep": 0}, "keep=0"), ({"keep": True}, "keep=True"), ({"extra": 3}, "extra")],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    run = Run(0, torch.float32)
    with pytest.raises(ArgumentError, match=words):
        checkpoints.save(tmp_path / "a", run.model, run.optimizer, **arguments)
    with pytest.raises(ArgumentError, match="memory"):
        checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer, memory=-1)
    with pytest.raises(ArgumentError, match="is none of model's"):
        checkpoints.save(tmp_path / "a", Tied(), run.optimizer)
    checkpoints.save(tmp_path / "a", run.model, run.optimizer)
    with pytest.raises(ArgumentError, match="exists already"):
        checkpoints.save(tmp_path / "a", run.model, run.optimizer)
    run.optimizer.close()


# ---- others' formats ------------------------------------------------------------------------------------------------


@compat("state of torch.optim.AdamW taken over, and given back", "single")
@pytest.mark.parametrize("first", ["torch", "ours"])
def test_checkpoints_fit_torchs_own_adamw(first: str, tmp_path: Path) -> None:
    """Saved by one, gone on with by the other: as one of them alone."""
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "ours": lambda model: AdamW(model.parameters(), lr=1e-3, threads=1),
    }
    second = "ours" if first == "torch" else "torch"
    model = model_of()
    optimizer = makers[first](model)
    train(model, optimizer, range(5))
    checkpoints.save(tmp_path / "a", model, optimizer)
    train(model, optimizer, range(5, 10))
    other = model_of(seed=9)
    resumed = makers[second](other)
    checkpoints.load(tmp_path / "a", other, resumed)
    train(other, resumed, range(5, 10))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for one in (optimizer, resumed):
        if isinstance(one, AdamW):
            one.close()


def test_weights_alone(saved: Path) -> None:
    model = Tied(7).bfloat16()
    checkpoints.load(saved, model)
    run = Run(3, torch.bfloat16)
    run.resume(saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), run.model.parameters(), strict=True))
    run.optimizer.close()


def test_the_safetensors_package_reads_what_we_write_and_we_its(saved: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install safetensors")
    theirs = package.load_file(saved / TENSORS)
    ours = TensorReader(saved / TENSORS)
    assert set(theirs) == set(ours.entries)
    for name, value in theirs.items():
        mine = ours.tensor(name)
        assert mine.dtype == value.dtype and mine.shape == value.shape and torch.equal(mine, value)
    package.save_file({"a": torch.arange(5), "b": torch.ones(2, 3).bfloat16()}, tmp_path / "x.safetensors")
    reader = TensorReader(tmp_path / "x.safetensors")
    assert torch.equal(reader.tensor("a"), torch.arange(5))
    assert torch.equal(reader.tensor("b"), torch.ones(2, 3).bfloat16())


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}more", b"\x02\0\0\0\0\0\0\0[]"])
def test_files_that_are_no_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ArgumentError, match="not a safetensors file, or damaged"):
        TensorReader(tmp_path / "x")


def test_headers_that_lie(tmp_path: Path) -> None:
    for entry in (
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"shape": [2]},
    ):
        text = json.dumps({"a": entry}).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
        with pytest.raises(ArgumentError, match="not a safetensors file, or damaged"):
            TensorReader(tmp_path / "x")


def test_a_loaded_state_must_be_finite(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))  # type: ignore[arg-type]
    first = next(iter(model.parameters()))
    optimizer.state[first]["exp_avg"].fill_(math.nan)
    checkpoints.save(tmp_path / "a", model, optimizer)
    other = model_of(seed=3)
    with AdamW(other.parameters(), threads=1) as ours:
        before = ours.state_digests()
        with pytest.raises(ArgumentError, match="NaN or infinite"):
            checkpoints.load(tmp_path / "a", other, ours)
        assert ours.state_digests() == before
        batch(other, 0)
