"""Mistakes of a first day: each ends in an error or a warning that names what was given, expected and to be done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import superoffload
from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError, UnknownArgument
from superoffload.host import environment
from superoffload.host.numbers import MOST_THREADS
from superoffload.optimizer.advice import CLIPPED_BEFORE, SKIPPED, WITHOUT_GRADIENTS
from tests.support.adamw_training import batch, model_of

PACKAGE = Path(superoffload.__file__).parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threads": 1_000_000}, f"threads=1000000: expected at most {MOST_THREADS}, or None for one per"),
        ({"trace": 3}, "trace=3: expected the path of a file to write, or None"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0: expected a finite number above 0, or None for no clipping"),
        ({"model": nn.Linear(2, 2)}, "model: Linear, which has none of params; pass the model whose"),
        ({"process_group": 3}, "process_group=3: expected a torch.distributed.ProcessGroup that this rank is in"),
        ({"SUPEROFFLOAD_DEVICE_TIMEOUT": "-5"}, "SUPEROFFLOAD_DEVICE_TIMEOUT='-5': expected a number of seconds above"),
        ({"SUPEROFFLOAD_RANK_TIMEOUT": "1 min"}, "SUPEROFFLOAD_RANK_TIMEOUT='1 min': expected a number of seconds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_cannot_be_meant(arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is checked also where it is not needed: on the CPU and alone."""
    for name in [name for name in arguments if name.isupper()]:
        monkeypatch.setenv(name, arguments.pop(name))
    with pytest.raises(ArgumentError) as caught:
        AdamW(model_of().parameters(), **arguments)
    assert str(caught.value).startswith(words)
    if "threads" in arguments:
        with pytest.raises(ArgumentError, match="threads=1000000: expected at most"):
            superoffload.CPUAdamW(model_of().parameters(), **arguments)


def test_a_variable_that_nothing_reads_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are read, empty or of others are not told."""
    monkeypatch.setattr(environment, "_told", set())
    for variable in (*environment.OF_THE_BUILD, "SUPER"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("SUPEROFFLOAD_ISAS", "")
    monkeypatch.setenv("superoffload_libcuda", "7")
    with pytest.warns(RuntimeWarning, match="superoffload_libcuda='7' in the environment has no effect") as caught:
        for _ in range(2):
            AdamW(model_of().parameters()).close()
    (warning,) = caught
    assert warning.filename == __file__ and "did you mean SUPEROFFLOAD_LIBCUDA?" in str(warning.message)


def test_accumulate_without_with() -> None:
    with AdamW(model_of().parameters()) as optimizer:
        with pytest.warns(RuntimeWarning, match=r"accumulate\(\) was called without `with`") as caught:
            optimizer.accumulate()
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.accumulate():
                pass


def test_settings_in_a_group_that_nobody_reads() -> None:
    model = model_of()
    with pytest.raises(UnknownArgument, match=r"param_groups\[0\]: learning_rate=0.1 would not be read; .* lr\?"):
        AdamW([{"params": model.parameters(), "learning_rate": 0.1}])
    with pytest.raises(UnknownArgument, match=r"max_grad_norm=1.0 would not be read: the norm is that of all groups"):
        AdamW([{"params": model.parameters(), "max_grad_norm": 1.0}])
    with AdamW([{"params": model.parameters(), "initial_lr": 0.1, "lr_scale": 2.0, "name": "mine"}]) as optimizer:
        assert optimizer.param_groups[0]["lr_scale"] == 2.0, "schedulers and users keep what they like there"


def test_a_monitor_of_something_else() -> None:
    wrong: Any = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"optimizer: Linear, expected superoffload\.AdamW"):
        superoffload.Monitor(wrong)


# ---- steps that do nothing: told once --------------------------------------------------------------------------------


def empty(model: nn.Module, optimizer: AdamW, step: int) -> None:
    """No backward."""


def not_finite(model: nn.Module, optimizer: AdamW, step: int) -> None:
    (batch(model, step) * float("nan")).backward()


def clipped_by_hand(model: nn.Module, optimizer: AdamW, step: int) -> None:
    optimizer.max_grad_norm = 1e-3
    batch(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize(
    ("before", "steps", "words"),
    [
        (empty, WITHOUT_GRADIENTS, ("none of the", "Call backward() before step()", "fully_shard")),
        (not_finite, SKIPPED, (f"{SKIPPED} steps in a row were skipped", "GradScaler")),
        (clipped_by_hand, CLIPPED_BEFORE, ("clip_grad_norm_", "was max_grad_norm=0.001 itself in 5 steps in a row")),
    ],
    ids=["empty", "not finite", "clipped by hand"],
)
def test_steps_that_do_nothing_are_told_once(before: Any, steps: int, words: tuple[str, ...]) -> None:
    model = model_of()
    with warnings.catch_warnings(record=True) as caught, AdamW(model.parameters(), threads=1) as optimizer:
        warnings.simplefilter("always")
        for step in range(3 * steps):
            optimizer.zero_grad()
            before(model, optimizer, step)
            optimizer.step()
    (message,) = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    assert all(word in message for word in words)


def test_a_warning_that_is_an_error_comes_once_the_step_is_whole() -> None:
    model = model_of()
    with warnings.catch_warnings(), AdamW(model.parameters(), threads=1) as optimizer:
        warnings.simplefilter("error")
        for step in range(SKIPPED):
            optimizer.zero_grad()
            (batch(model, step) * float("nan")).backward()
            with pytest.raises(RuntimeWarning, match="were skipped") if step == SKIPPED - 1 else nullcontext():
                optimizer.step()
        optimizer.zero_grad()
        batch(model, 0).backward()
        optimizer.step()
        assert (optimizer.stats()["skipped_steps"], optimizer.stats()["steps"]) == (SKIPPED, 1)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        checkpoints.save(tmp_path / "run" / "step-1", model, optimizer)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        (tmp_path / "pretrained").mkdir()
        for name, words in (
            ("run", r"run: a folder of checkpoints; .* newest is .*step-1 \(checkpoints"),
            ("none", r"none: no such folder; checkpoints.latest\(\) names"),
            ("model.pt", r"model.pt: a file, expected the folder .* loads with torch.load and"),
            ("pretrained", r"pretrained: no manifest.json, .* a folder of save_pretrained with"),
        ):
            with pytest.raises(ArgumentError, match=words):
                checkpoints.load(tmp_path / name, model, optimizer)
        with pytest.raises(ArgumentError, match=r"folder='.*pt/step-1': cannot be made \(.*\); name one where you"):
            checkpoints.save(tmp_path / "model.pt" / "step-1", model, optimizer)


def test_what_is_no_state_dict_and_what_cannot_be_saved_are_named(tmp_path: Path) -> None:
    model = model_of()
    others: tuple[tuple[Any, str], ...] = (
        ("run/optimizer.pt", "'run/optimizer.pt', which torch.load reads"),
        (nn.Linear(2, 2).state_dict(), "a dict with 'weight', 'bias'"),
        (None, "a NoneType"),
    )
    with AdamW(model.parameters()) as optimizer:
        for given, words in others:
            with pytest.raises(ArgumentError, match=f"^state_dict: {words}, expected a dict with 'state' and 'param_g"):
                optimizer.load_state_dict(given)
        with pytest.raises(ArgumentError, match=r"^extra\['mine'\]: Fraction: not saved, since only what"):
            checkpoints.save(tmp_path / "one", model, optimizer, extra={"step": 1, "mine": Fraction(1, 3)})


# ---- a clone that was not built -----------------------------------------------------------------------------------


def test_a_clone_that_was_not_built_says_so(tmp_path: Path) -> None:
    clone = tmp_path / "superoffload"
    clone.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(PACKAGE / name, clone)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", "-c", "from superoffload import _native"]  # nothing but the clone
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: the compiled part of superoffload is not in ")
    assert str(clone) in last and "pip install --editable ." in last
