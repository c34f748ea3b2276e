"""superoffload.checkpoints in one process: refused by name when damaged, foreign or unsafe."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.safetensors import Entry, TensorFile
from superoffload.errors import ArgumentError
from tests.support.adamw_training import model_of
from tests.support.compatibility import compat
from tests.support.over_stand_in import only_over_stand_in
from tests.support.saved_runs import TENSORS, Run, Tied, assert_same, save_two_steps


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
    return save_two_steps(tmp_path_factory.mktemp("saved"))


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@compat("a truncated, bit-flipped or foreign checkpoint", "single", "stand_in", note="refused with the file's name")
@only_over_stand_in(damage=("truncated tensors", "flipped bit in a tensor", "another file"))
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
    """Refuses it even if manifest and checksums were made to fit."""
    folder = copy_of(saved, tmp_path / "evil")
    data = pickle.dumps({"extra": Evil()})
    (folder / "state.pt").write_bytes(data)
    manifest = folders.read_manifest(folder)
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
