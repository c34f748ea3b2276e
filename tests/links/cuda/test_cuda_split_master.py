"""Split masters over the fake driver: the bits of the host link, whose halves are in pinned memory or on the device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints.tensor_files import TensorFile
from superoffload.engine.placement import Placer
from tests.support.adamw_training import batch, train, weights
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fake_cuda_training import training
from tests.support.split_masters import SPLIT, TIES, masters_of, same_bits, same_states, shard_of, state_of, tied


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


STEPPED = (0, 1, 6, 7)  # the parameters of two layers, whose gradients come in another order than was guessed


@pytest.mark.parametrize(("memory", "placement"), [(1 << 30, {"gpu_fraction": 0.6}), (0, None)], ids=str)
def test_a_save_keeps_the_halves_of_what_moves(fake: Fake, memory: int, placement: Any, tmp_path: Path) -> None:
    """It begins before the first step, behind which buckets are made anew, and state moves to the device. Parameters
    that had no gradient were not stepped, so that nothing was copied of them before."""
    write = TensorFile.write

    def late(file: TensorFile, name: str, runs: Any) -> None:
        time.sleep(0.01)
        write(file, name, runs)

    model = Shuffled()
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    options: dict[str, Any] = {"threads": 2, "bucket_numel": 2048, "lr": 1e-2, "speculation": "never", **SPLIT}
    with (
        mock.patch.object(Placer, "choose_first", lambda *_: set[int]()),
        on_fake_device(fake),
        AdamW(model.parameters(), model=model, placement=placement, **options) as optimizer,
    ):
        tied(optimizer, model)  # masters have bits that the parameters lack
        expected = state_of(optimizer)
        with mock.patch.object(TensorFile, "write", late):
            saving = checkpoints.save_in_background(tmp_path / "a", model, optimizer, memory=memory)
            batch(model, 0).backward()
            for index, param in enumerate(model.parameters()):
                param.grad = param.grad if index in STEPPED else None
            optimizer.step()
            train(model, optimizer, range(1))
            fake.synchronize()
            saving.wait(60)
        moved = [shard_of(optimizer, param).resident for param in model.parameters()]
        assert any(here for index, here in enumerate(moved) if index not in STEPPED) == (placement is not None)
    other = Shuffled()
    with on_host(), AdamW(other.parameters(), threads=1) as whole:
        checkpoints.load(tmp_path / "a", other, whole)
        assert same_states(state_of(whole), expected)


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
        link: Any = optimizer._engine.link
        up = link.roles["up"]
        fake.sleep(50_000, up)
        optimizer.step()
        optimizer.load_masters(masters)
        fake.synchronize(up)
        fake.synchronize()
        assert same_bits(weights(model), before)
        given = torch.cat([master.flatten() for master in masters])
        assert same_bits(torch.cat([state["master"].flatten() for state in optimizer.state.values()]), given)
