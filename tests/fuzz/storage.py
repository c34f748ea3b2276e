"""Operations that look at, save and load state."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superoffload import checkpoints
from superoffload.errors import ArgumentError, StateError
from tests.fuzz.program import Op
from tests.fuzz.world import Saved, World


def look(world: World, op: Op) -> None:
    optimizer, at = world.optimizer, op["at"]
    world.count(f"look, {at}")
    if at == "digests":
        world.note("digests", optimizer.state_digests())
    elif at == "state_dict":
        world.note("state_dict", _digest(optimizer.state_dict()))
    else:
        if at == "synchronize":
            optimizer.synchronize()
        known = [param for param in world.grouped() if param in optimizer.state]
        world.note("state", [_digest(dict(optimizer.state[param])) for param in known])


def sleep(world: World, op: Op) -> None:
    """Unless gradients wait, which only a run that takes them during backward can tell."""
    if world.written:  # wake() takes writes over; one that is refused does not
        world.optimizer.refresh_masters()
    try:
        world.optimizer.sleep()
    except StateError as error:
        assert "gradients of this step" in str(error)
        world.count("sleep, refused")
    else:
        world.count("sleep, slept")
    world.note_published()
    world.optimizer.wake()


def save(world: World, op: Op) -> None:
    how = op["how"]
    if how == "background" and any(_may_begin_to_train(world, param) for param in world.grouped()):
        how = "checkpoint"
    world.count(f"save, {how}")
    folder = world.folder / f"operation-{world.at}"
    saving = None
    what: Any = folder
    if how == "state_dict":
        what = copy.deepcopy((world.net.state_dict(), world.optimizer.state_dict()))
    elif how == "checkpoint":
        checkpoints.save(folder, world.net, world.optimizer)
    else:
        saving = checkpoints.save_in_background(folder, world.net, world.optimizer, memory=op["memory"])
    if op["slot"] in world.slots and world.slots[op["slot"]].saving is not None:
        world.wait_for_savings()
    state = world.oracle.copy(world.net.parameters()) if world.oracle is not None else None
    world.slots[op["slot"]] = Saved(what, state, saving)


def _may_begin_to_train(world: World, param: Tensor) -> bool:
    """The next step may make state for it and write it, which a save in the background does not expect."""
    return param not in world.optimizer.state and (param.requires_grad or param.grad is not None)


def load(world: World, op: Op) -> None:
    saved = world.slots.get(op["slot"])
    if saved is None:
        return
    world.wait_for_savings()
    world.count("load, something")
    world.written = True
    try:
        if isinstance(saved.what, Path):
            checkpoints.load(saved.what, world.net, world.optimizer)
        else:
            weights, state_dict = copy.deepcopy(saved.what)
            world.net.load_state_dict(weights)
            if world.oracle is not None:
                world.oracle.written(world.net.parameters())
            world.optimizer.load_state_dict(state_dict)
    except ArgumentError:  # it has other groups than there are now
        world.count("load, refused")
        world.note("raised", "ArgumentError")
        return
    if world.oracle is not None and saved.state is not None:
        world.oracle.loaded(saved.state)
    world.note_published()


def wait_saved(world: World, op: Op) -> None:
    world.wait_for_savings()


def _digest(value: Any) -> str:
    """Of tensors and plain values, however nested."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        data = repr([(key, _digest(each)) for key, each in value.items()]).encode()
    elif isinstance(value, (list, tuple)):
        data = repr([_digest(each) for each in value]).encode()
    else:
        data = repr(value).encode()
    return hashlib.sha256(data).hexdigest()
