"""Split masters over the fake driver: the bits of the host link, whose halves are in pinned memory or on the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints.safetensors import TensorFile
from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from superoffload.engine.placement import Placer
from tests.support.adamw_training import batch, model_of, train, weights
from tests.support.fake_cuda import Fake, LateLink, on_fake_device, on_host
from tests.support.fake_cuda_training import moves_behind_the_stream, training
from tests.support.link_runs import LATE, deep_model
from tests.support.split_masters import (
    SPLIT,
    TIES,
    assert_split,
    masters_of,
    same_bits,
    same_states,
    shard_of,
    state_of,
    tied,
)

Code = Callable[[nn.Module, AdamW], None]
Outcome = tuple[dict[str, str], dict[str, float | int]]


@pytest.fixture(autouse=True)
def _moves(fake: Fake) -> Iterator[None]:
    with moves_behind_the_stream(fake):
        yield


def steps(model: nn.Module, optimizer: AdamW) -> None:
    """Clipped but once, and skipped once, where all but one gradient may have been stepped already."""
    first = next(model.parameters())
    for seed in range(6):
        optimizer.zero_grad()
        handle = first.register_hook(lambda gradient, seed=seed: gradient * (torch.nan if seed == 4 else 1.0))
        batch(model, seed, scale=0.01 if seed == 2 else 1.0).backward()
        handle.remove()
        optimizer.step()


def run(code: Code, synchronize: Callable[[], None], **options: Any) -> Outcome:
    model = model_of(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: synchronize())
    options = {"threads": 2, "bucket_numel": 1024, "lr": 1e-2, **SPLIT, **options}
    with AdamW(model.parameters(), **options) as optimizer:
        code(model, optimizer)
        synchronize()
        assert_split(optimizer)
        return optimizer.state_digests(), optimizer.stats()


def test_state_that_moves_with_every_step(fake: Fake) -> None:
    """To the device and back, some of it and all; the halves with it."""

    def code(model: nn.Module, optimizer: AdamW) -> None:
        steps(model, optimizer)
        steps(model, optimizer)

    expected, _ = run(code, lambda: None, max_grad_norm=0.5)
    fractions = itertools.cycle([0.5, 1.0, 0.3, 0.0, 0.7])
    resident: list[float] = []

    def move(engine: Engine, placer: Placer) -> None:
        placer.fraction = next(fractions)
        engine.tail.land()
        engine.tail.settle()
        fake.synchronize()
        with mock.patch.object(Placer, "measure", lambda *_: None):
            engine.layout.place_by(mock.Mock())
        resident.append(engine.stats()["params_on_device"])

    with (
        mock.patch.object(Placer, "is_due", lambda _: True),
        mock.patch.object(Engine, "_place_by_measurement", move),
    ):
        fake.delays(1, LATE)
        with on_fake_device(fake):
            found, stats = run(code, fake.synchronize, placement="auto", speculation="always", max_grad_norm=0.5)
    assert found == expected and fake.mismatches == 0
    assert len(set(resident)) == 5 and min(resident) == 0
    assert stats["buckets_speculated"] > 0


# ---- buckets that are made anew ---------------------------------------------------------------------------------


class Shuffled(nn.Module):
    """Gradients come not in the order of registration, and parameters have different sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(16, 40), (40, 40), (40, 64), (64, 24), (24, 4)]
        self.layers = nn.ModuleList([nn.Linear(*sizes[at]) for at in (2, 0, 4, 1, 3)])
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        for at in (1, 3, 0, 4, 2):
            x = torch.tanh(self.layers[at](x))
        return x


@contextmanager
def shuffled(fake: Fake, **options: Any) -> Iterator[tuple[nn.Module, AdamW]]:
    """Masters have bits that the parameters lack, and no step was made."""
    model = Shuffled()
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    options = {"threads": 2, "bucket_numel": 2048, "lr": 1e-2, "speculation": "always", **SPLIT, **options}
    with on_fake_device(fake), AdamW(model.parameters(), model=model, **options) as optimizer:
        tied(optimizer, model)
        yield model, optimizer


STEPPED = (0, 1, 6, 7)  # the parameters of two layers, whose gradients come in another order than was guessed
OTHERS = (2, 3, 4, 5, 8, 9)


def step_two_layers(model: nn.Module, optimizer: AdamW) -> None:
    """Behind it the order of backward is known, and only ``STEPPED`` were stepped, none was speculated."""
    assert optimizer.stats()["buckets_speculated"] == 0
    batch(model, 0).backward()
    params = list(model.parameters())
    for index in OTHERS:
        params[index].grad = None
    optimizer.step()


def places_of_halves(optimizer: AdamW) -> list[tuple[Shard, int, int]]:
    """Where upper halves begin and end in memory, with the shard that they are of."""
    parts = [(shard, part) for shard in optimizer._engine.shards if shard.upper for part in shard.upper.parts]
    return [(shard, part.data_ptr(), part.data_ptr() + part.nbytes) for shard, part in parts]


def test_halves_survive_the_memory_that_is_used_again(fake: Fake) -> None:
    """Behind the first step, the shadows of the new buckets lie where others were, in the same pinned memory."""
    with shuffled(fake, speculation="never") as (model, optimizer):
        before = state_of(optimizer)
        buckets, were = list(optimizer._engine.buckets), places_of_halves(optimizer)
        step_two_layers(model, optimizer)
        optimizer.zero_grad()
        fake.synchronize()
        assert optimizer._engine.buckets != buckets
        others = [(one, other) for one in places_of_halves(optimizer) for other in were if one[0] is not other[0]]
        assert any(max(one[1], other[1]) < min(one[2], other[2]) for one, other in others), "in the place of others"
        now = state_of(optimizer)
        assert same_states([now[index] for index in OTHERS], [before[index] for index in OTHERS])
        assert not any(same_states([now[index]], [before[index]]) for index in STEPPED)
        train(model, optimizer, range(2))
        fake.synchronize()
        assert_split(optimizer)


@contextmanager
def written_slowly() -> Iterator[None]:
    write = TensorFile.write

    def late(file: TensorFile, name: str, runs: Any) -> None:
        time.sleep(0.01)
        write(file, name, runs)

    with mock.patch.object(TensorFile, "write", late):
        yield


@pytest.mark.parametrize(("memory", "placement"), [(1 << 30, {"gpu_fraction": 0.6}), (0, None)], ids=str)
def test_a_save_keeps_the_halves_of_what_moves(fake: Fake, memory: int, placement: Any, tmp_path: Path) -> None:
    """It begins before the first step, behind which buckets are made anew, and state moves to the device. Parameters
    that had no gradient were not stepped, so that nothing was copied of them before."""
    with (
        mock.patch.object(Placer, "choose_first", lambda *_: set[int]()),
        shuffled(fake, placement=placement, speculation="never") as (model, optimizer),
    ):
        expected = state_of(optimizer)
        with written_slowly():
            saving = checkpoints.save_in_background(tmp_path / "a", model, optimizer, memory=memory)
            step_two_layers(model, optimizer)
            train(model, optimizer, range(1))
            fake.synchronize()
            saving.wait(60)
        moved = [shard_of(optimizer, param).resident for param in model.parameters()]
        assert any(moved[index] for index in OTHERS) == (placement is not None)
    other = Shuffled()
    with on_host(), AdamW(other.parameters(), threads=1) as whole:
        checkpoints.load(tmp_path / "a", other, whole)
        assert same_states(state_of(whole), expected)


# ---- loading, saving, closing -----------------------------------------------------------------------------------


def way_up(optimizer: AdamW) -> int:
    """The stream that parameters travel on."""
    link = optimizer._engine.link
    assert isinstance(link, LateLink)
    return link.roles["up"]


def test_masters_that_are_given_do_not_reach_parameters_on_their_way(fake: Fake) -> None:
    """Of masters at ties the upper half is the other neighbour than the parameter, which only a step may change."""
    with training(fake, speculation="never", lr=0.0, weight_decay=0.0, **SPLIT) as (model, optimizer):
        masters = [masters_of(TIES, param.numel()).view(param.shape) for param in model.parameters()]
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        optimizer.refresh_masters()
        before = weights(model).clone()
        optimizer.zero_grad()
        batch(model, 0).backward()
        up = way_up(optimizer)
        fake.sleep(50_000, up)
        optimizer.step()
        optimizer.load_masters(masters)
        fake.synchronize(up)
        fake.synchronize()
        assert same_bits(weights(model), before)
        given = torch.cat([master.flatten() for master in masters])
        assert same_bits(torch.cat([state["master"].flatten() for state in optimizer.state.values()]), given)


def test_a_load_does_not_reach_parameters_that_are_on_their_way(fake: Fake) -> None:
    """The shadow is half of the masters that are loaded, and the device has still to read it."""
    with training(fake, speculation="never", **SPLIT) as (model, optimizer):
        saved = optimizer.state_dict()
        train(model, optimizer, range(2, 6))
        optimizer.zero_grad()
        batch(model, 6).backward()
        up = way_up(optimizer)
        fake.sleep(50_000, up)
        optimizer.step()
        optimizer.load_state_dict(saved)
        fake.synchronize(up)
        fake.synchronize()
        loaded = torch.cat([saved["state"][i]["master"].flatten() for i in range(len(saved["state"]))])
        assert (weights(model) != loaded.bfloat16()).sum() > weights(model).numel() / 2
        optimizer.refresh_masters()
        assert_split(optimizer)


def test_the_state_of_a_closed_optimizer_is_readable(fake: Fake) -> None:
    with training(fake, placement={"gpu_fraction": 0.5}, **SPLIT) as (_, optimizer):
        before, digests = state_of(optimizer), optimizer.state_digests()
        optimizer.close()
        assert optimizer.state_digests() == digests
        assert same_states(state_of(optimizer), before)
        for position, values in optimizer.state_dict()["state"].items():
            assert same_bits(values["master"], before[position]["master"])


def test_on_the_device_there_is_one_copy_of_each_half(fake: Fake) -> None:
    """Of 2 bytes each, apart from the parameter, where its user's writes are noticed by comparing both."""
    model = deep_model(torch.bfloat16)
    with training(fake, model=model, placement={"gpu_fraction": 0.5}, **SPLIT) as (_, optimizer):
        on_host = {
            bucket.shadow.untyped_storage().data_ptr() for bucket in optimizer._engine.buckets if not bucket.resident
        }
        for param in model.parameters():
            shard = shard_of(optimizer, param)
            assert shard.upper is not None and shard.master.dtype is torch.int16
            storages = {part.untyped_storage().data_ptr() for part in shard.upper.parts}
            assert param.untyped_storage().data_ptr() not in storages
            assert (not shard.resident) == (storages <= on_host)
            assert not shard.resident or len(shard.upper.parts) == 1
