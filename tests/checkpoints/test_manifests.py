"""Checkpoints whose parts do not fit together, with checksums that fit: refused, with every weight's bit as it was."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload import checkpoints
from superoffload.errors import ArgumentError
from tests.support.forged_checkpoints import STRANGE, Content, a_file, forged, with_state
from tests.support.saved_runs import TENSORS, Run, assert_same

KEY = "model.norm.running_mean"  # of 8 elements


def piece(**values: Any) -> Callable[[Content], None]:
    return lambda content: content["tensors"][KEY][0].update(values)


def at(*path: Any, value: Any = None, delete: bool = False) -> Callable[[Content], Any]:
    def change(content: Any) -> Any:
        place = functools.reduce(lambda one, key: one[key], path[:-1], content)
        if delete:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return content

    return change


without = functools.partial(at, delete=True)


MANIFESTS: dict[str, Callable[[Content], Any]] = {
    "no state": without("files", "state.pt"),
    "state without checksum": at("files", "state.pt", value={"bytes": 5, "header": "0" * 64}),
    "up the tree": a_file("../../etc/passwd"),
    "twice": lambda content: content["tensors"][KEY].append(content["tensors"][KEY][0]),
    "shape huge": piece(shape=[1 << 40, 1 << 40]),
    "offsets of two dimensions": piece(offsets=[0, 0]),
    "length 1e9": piece(lengths=[1e9]),
    "file up the tree": piece(file="../../etc/passwd"),
    "file without tensors": piece(file="state.pt"),
    "another shape of as many": piece(shape=[2, 4], offsets=[0, 0], lengths=[2, 4]),
    "a moment less": without("tensors", "exp_avg_sq.scale"),
    "a master less": without("tensors", "master.scale"),
    "a tensor that is not in the file": at("tensors", "model.new", value=[
        {"shape": [], "offsets": [], "lengths": [], "flat": False, "file": TENSORS, "sha256": "0" * 64}]),
}  # fmt: skip


def refusal_of(folder: Path, run: Run) -> str:
    """The error of a load that changes nothing; short, and without what steers a terminal."""
    before = run.everything()
    with pytest.raises(ArgumentError) as caught:
        checkpoints.load(folder, run.model, run.optimizer)
    assert_same(run.everything(), before)
    error = str(caught.value)
    assert error.isprintable() and len(error) < 1200
    return error


def test_forged_manifests_are_refused(saved: Path, run: Run, tmp_path: Path) -> None:
    for number, (name, change) in enumerate(MANIFESTS.items()):
        folder = forged(saved, tmp_path / str(number), change)
        assert str(folder) in refusal_of(folder, run), name
    for version in (1, 3, "2", None, [2]):
        folder = forged(saved, tmp_path / f"version-{version}", at("version", value=version))
        assert "this superoffload reads 2" in refusal_of(folder, run), version


STATES: dict[str, Callable[[Content], Any]] = {
    "a list": lambda _: [],
    "no groups": at("groups", value=None),
    "params numbers": at("groups", 0, "params", value=[1]),
    "no lr": lambda content: {**content, "groups": [{"params": g["params"]} for g in content["groups"]]},
    "weight decay a list": at("groups", 0, "weight_decay", value=[1]),
    "amsgrad of many": at("groups", 0, "amsgrad", value=torch.ones(3)),
    "steps negative": at("steps", "scale", value=-1),
    "steps a float": at("steps", "scale", value=1.5),
    "steps beyond all": at("steps", "scale", value=10**400),
    "aliases of what is not there": at("aliases", "head.weight", value="nothing"),
    "other of no module": at("other", "nothing._extra_state", value=3),
    "extra missing": lambda content: {key: value for key, value in content.items() if key != "extra"},
}


def test_forged_states_are_refused(saved: Path, run: Run, tmp_path: Path) -> None:
    for number, (name, change) in enumerate(STATES.items()):
        data = io.BytesIO()
        torch.save(change(torch.load(saved / "state.pt", weights_only=True)), data)
        assert refusal_of(with_state(saved, tmp_path / str(number), data.getvalue()), run), name
    for junk in (b"", b"x", b"PK\x03\x04", b"\x80\x02(((((", b"\x80\x02]q\x00h\x01.", b"\x80\x02K\x01\x94u."):
        folder = with_state(saved, tmp_path / f"junk-{junk.hex()}", junk)
        assert "state.pt: cannot be read safely" in refusal_of(folder, run), junk


JUNK: list[Any] = [None, True, -1, 0, 1, 1 << 63, 1e300, float("nan"), "", "x", "..", "\0", [], {}, [[]], {"a": 1}]


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in content if isinstance(content, dict) else range(len(content)):
        yield (*path, key)
        if isinstance(content[key], (dict, list)):
            yield from places(content[key], (*path, key))


def mutate(content: Content, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        *above, key = chance.choice(list(places(content)))
        parent: Any = content
        for step in above:
            parent = parent[step]
        kind = chance.randrange(4)
        if kind == 0:
            del parent[key]
        elif kind == 1:
            parent[key] = copy.deepcopy(chance.choice(JUNK))
        elif kind == 2 and type(parent[key]) is int:
            parent[key] += chance.choice((-1, 1, 7))
        elif isinstance(parent, dict):
            parent[chance.choice(list(parent))] = parent.pop(key)


def test_mutated_manifests_change_nothing(saved: Path, run: Run, tmp_path: Path) -> None:
    """Every mutant either raises ArgumentError, or loads what was saved: checksums leave nothing between."""
    other, loaded = Run(4, torch.bfloat16), 0
    before = other.optimizer.state_digests()
    checkpoints.load(saved, run.model, run.optimizer)
    for seed in range(150):
        folder = forged(saved, tmp_path / str(seed), functools.partial(mutate, chance=random.Random(seed)))
        try:
            checkpoints.load(folder, other.model, other.optimizer)
        except ArgumentError:
            assert loaded or other.optimizer.state_digests() == before
            continue
        loaded += 1
        assert other.optimizer.state_digests() == run.optimizer.state_digests(), seed
    assert loaded < 50
    other.optimizer.close()


# ---- what is no file of ours ------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", STRANGE)
def test_strange_files_hide_no_checkpoint_and_hang_nothing(kind: str, saved: Path, run: Run, tmp_path: Path) -> None:
    good = forged(saved, tmp_path / "step-2", lambda _: None)
    for number, name in ((3, "manifest.json"), (4, "state.pt"), (5, TENSORS)):
        folder = forged(saved, tmp_path / f"step-{number}", lambda _: None)
        (folder / name).unlink()
        STRANGE[kind](folder / name)
        with pytest.raises(ArgumentError):
            checkpoints.load(folder, run.model, run.optimizer)
    assert checkpoints.latest(tmp_path) == good


def test_paths_that_cannot_be_and_links(saved: Path, run: Run, tmp_path: Path) -> None:
    folders: list[Any] = ["a\0b", "x" * 5000, "\ud800", b"a", 3]
    for folder in folders:
        with pytest.raises(ArgumentError):
            checkpoints.load(folder, run.model, run.optimizer)
        assert not isinstance(folder, str) or checkpoints.latest(folder) is None
    (tmp_path / "all").symlink_to(saved.parent)
    (tmp_path / "newest").symlink_to(tmp_path / "all" / saved.name)
    checkpoints.load(tmp_path / "newest", run.model, run.optimizer)
    assert checkpoints.latest(tmp_path) == tmp_path / "newest"
