"""AdamW with state_dtype="8bit": the reference's bits in every schedule, shown, saved and loaded as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, CPUAdamW
from superoffload.engine.moments import noise_stream
from superoffload.engine.schedule import Schedule
from superoffload.errors import ArgumentError
from tests.support.adamw_training import check_counters, train
from tests.support.reference import adam, eight_bit
from tests.support.reference.stochastic import noise
from tests.support.saved_runs import as_dict, in_a_folder
from tests.support.split_masters import same_bits, state_of

EIGHT: dict[str, Any] = {"state_dtype": "8bit"}
DTYPES = ("fp32", "bf16", "8bit")
WAYS = {
    "never": ("never", 0.0),
    "always": ("always", 0.0),
    "adaptive": ("adaptive", 0.0),
    "two phases": ("always", 1.0),
}


def odd_model() -> nn.Module:
    """Shards of many lengths: shorter than a block of codes, cut by buckets, and with a last block that is cut."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 4)).bfloat16()


def gradients(model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(p.shape, generator=generator) * 10 ** (-4 * torch.rand(p.shape, generator=generator))).bfloat16()
        for p in model.parameters()
    ]


def give(model: nn.Module, values: list[Tensor]) -> None:
    """Backward of a loss that has these gradients, which hooks see one by one."""
    terms = [(p.float() * g.float()).sum() for p, g in zip(model.parameters(), values, strict=True)]
    torch.stack(terms).sum().backward()


class Reference:
    """Steps by the NumPy reference, parameter by parameter."""

    def __init__(self, model: nn.Module, seed: int, published: str) -> None:
        self.masters = [p.detach().float().reshape(-1).numpy().copy() for p in model.parameters()]
        self.moments = [[np.zeros(eight_bit.stored_size(len(m)), np.uint8) for _ in range(2)] for m in self.masters]
        self.published, self.step = published, 0
        self.streams = [noise_stream(seed, f"param_groups[0]['params'][{i}]") for i in range(len(self.masters))]

    def take(self, given: list[Tensor], max_grad_norm: float | None) -> None:
        flats = [g.reshape(-1).view(torch.uint16).numpy() for g in given]
        decision = adam.verdict([adam.sum_of_squares(g) for g in flats], max_grad_norm)
        if decision.found_inf:
            return
        self.step += 1
        hyper = adam.Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, self.step, decision.gradient_factor)
        for i, flat in enumerate(flats):
            random = noise(len(flat), self.streams[i], self.step)
            first, second = self.moments[i]
            stepped = eight_bit.step(self.masters[i], first, second, flat, self.published, hyper, random)
            self.masters[i], self.moments[i] = stepped.master, [stepped.exp_avg, stepped.exp_avg_sq]

    def expect(self, optimizer: AdamW) -> None:
        optimizer.synchronize()
        for i, state in enumerate(optimizer.state.values()):
            first, second = self.moments[i]
            numel = len(self.masters[i])
            assert same_bits(state["master"].reshape(-1), torch.from_numpy(self.masters[i]))
            shown = (state["exp_avg"], first, eight_bit.EXP_AVG), (state["exp_avg_sq"], second, eight_bit.EXP_AVG_SQ)
            for found, stored, form in shown:
                expected = eight_bit.read(stored, numel, form)
                np.testing.assert_array_equal(found.float().reshape(-1).numpy(), expected)


@pytest.mark.parametrize(
    ("way", "bucket_numel", "master"),
    [
        ("never", 1024, "split"),
        ("always", 1024, "split"),
        ("always", 1 << 20, "fp32"),
        ("adaptive", 1024, "fp32"),
        ("two phases", 1024, "split"),
    ],
)
def test_every_schedule_gives_the_bits_of_the_reference(way: str, bucket_numel: int, master: str) -> None:
    model = odd_model()
    mode, share = WAYS[way]
    options: dict[str, Any] = {"bucket_numel": bucket_numel, "threads": 2, "seed": 5, "master_dtype": master, **EIGHT}
    reference = Reference(model, 5, "split" if master == "split" else "bf16")
    with (
        mock.patch.object(Schedule, "share_to_publish", lambda *_: share),
        AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, speculation=mode, **options) as optimizer,
    ):
        for step in range(12):
            given = gradients(model, step)
            if step == 5:
                given[0][3, 3] = torch.nan
            # Just below the norm to come: the clip shows only once most buckets were speculated.
            norm = float(torch.stack([g.float().norm() for g in given]).norm())
            optimizer.max_grad_norm = 0.9 * norm if step in (3, 8, 9) else None
            optimizer.zero_grad()
            give(model, given)
            optimizer.step()
            reference.take(given, optimizer.max_grad_norm)
            reference.expect(optimizer)
        stats = optimizer.stats()
        assert stats["skipped_steps"] == 1
        if way == "always":
            assert stats["buckets_committed"] > 0
            assert stats["buckets_replayed"] > 0 or len(optimizer._engine.buckets) == 1
        if way == "two phases":
            assert stats["buckets_two_phase"] > 0
        check_counters(optimizer)


def expected_moment(given: Tensor, before: str, after: str, form: eight_bit.Format) -> Tensor:
    """Of one that was stored as ``before``, once it is loaded into ``after``: as it is, or rounded to nearest."""
    if DTYPES.index(after) <= DTYPES.index(before):
        return given
    if after == "bf16":
        return given.bfloat16().float()
    return torch.from_numpy(eight_bit.read(eight_bit.written(given.numpy(), form), len(given), form))


@pytest.mark.parametrize(
    ("before", "after"), [("8bit", "8bit"), ("fp32", "8bit"), ("8bit", "fp32"), ("bf16", "8bit"), ("fp32", "bf16")]
)
def test_each_setting_loads_each_other(before: str, after: str, tmp_path: Path) -> None:
    """Masters keep every bit. Moments do where they are as wide or wider, and are rounded to nearest elsewhere."""
    model, other = odd_model(), odd_model()
    masters = ("split", "fp32") if before == after else ("fp32", "split")
    options: dict[str, Any] = {"lr": 1e-2, "threads": 1}
    with (
        AdamW(model.parameters(), model=model, state_dtype=before, master_dtype=masters[0], **options) as saved,
        AdamW(other.parameters(), model=other, state_dtype=after, master_dtype=masters[1], **options) as loaded,
    ):
        train(model, saved, range(3))
        for carry in (as_dict, in_a_folder):
            carry(model, saved, other, loaded, tmp_path)
            for ours, theirs in zip(state_of(loaded), state_of(saved), strict=True):
                assert same_bits(ours["master"], theirs["master"])
                for name, form in (("exp_avg", eight_bit.EXP_AVG), ("exp_avg_sq", eight_bit.EXP_AVG_SQ)):
                    given = theirs[name].float().reshape(-1)
                    found = ours[name].float().reshape(-1)
                    assert torch.equal(found, expected_moment(given, before, after, form))
            train(other, loaded, range(3, 5))


def test_what_is_refused() -> None:
    wrong: list[Any] = ["int8", torch.uint8, None]
    for value in wrong:
        with pytest.raises(ArgumentError, match="expected 'fp32', 'bf16' or '8bit'"):
            AdamW([nn.Parameter(torch.zeros(3))], state_dtype=value)
    for seed in (-1, 0.5):
        given: dict[str, Any] = {"seed": seed}
        with pytest.raises(ArgumentError, match="seed"):
            AdamW([nn.Parameter(torch.zeros(3))], **given)
    params = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    with pytest.raises(ArgumentError, match=r"state_dtype='8bit'.*superoffload\.AdamW has them"):
        CPUAdamW(params, **EIGHT)
    unknown: dict[str, Any] = {"master_dtype": "split"}
    with pytest.raises(TypeError, match=r"master_dtype='split': .*superoffload\.AdamW has it; masters are fp32 here"):
        CPUAdamW(params, **unknown)
