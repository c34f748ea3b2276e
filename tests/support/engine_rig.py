"""An engine over plain tensors next to the NumPy reference, and comparisons of the two, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.emulation.traces import FixedSchedule
from superoffload import _native
from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.journal import JournalWidth
from superoffload.engine.master_halves import UpperHalves
from superoffload.engine.options import EngineOptions, Recorder
from superoffload.engine.schedule import Schedule
from superoffload.engine.verdict import Verdict
from superoffload.links.host import HostLink
from tests.support.guarded_arrays import assert_bits
from tests.support.reference.adam import Verdict as ReferenceVerdict
from tests.support.reference.convert import narrow, split
from tests.support.reference.trainer import Group, Parameter, Trainer

FORMAT_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COUNTERS = ("buckets_committed", "buckets_replayed", "buckets_undone", "buckets_skipped", "buckets_abandoned")


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """A flat copy whose dtype names the format as the reference has it: uint16 is bf16."""
    flat = tensor.detach().reshape(-1).clone()
    return flat.view(torch.uint16).numpy() if flat.dtype is torch.bfloat16 else flat.numpy()


def to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """The way back."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@dataclass
class Settings:
    """What a rig is made of; ``sizes`` has one list per param group."""

    sizes: Sequence[Sequence[int]]
    gradient_dtype: torch.dtype = torch.float32
    published_dtype: torch.dtype = torch.float32
    mode: str = "always"
    bucket_numel: int = 1024
    threads: int = 1
    seed: int = 0
    published: float | None = None  # share of what is not speculated that goes in two phases; None: as the mode says
    hyper: GroupHyper = field(default_factory=lambda: GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1))
    split: bool = False  # masters are, of bf16 parameters

    @property
    def published_format(self) -> str:
        """As the reference names it."""
        splits = self.split and self.published_dtype == torch.bfloat16
        return "split" if splits else FORMAT_OF[self.published_dtype]

    def schedule(self) -> Schedule | None:
        if self.published is None:
            return None
        return FixedSchedule(speculates=self.mode == "always", published=self.published)


class Rig:
    """A ``Engine`` whose shards and gradients the test owns, and the reference that should have the same bits."""

    def __init__(self, settings: Settings, recorder: Recorder | None = None) -> None:
        self.settings = settings
        self.random = np.random.default_rng(settings.seed)
        self.hypers = [settings.hyper for _ in settings.sizes]
        self.engine = Engine(
            HostLink(),
            EngineOptions(
                settings.mode,
                settings.bucket_numel,
                [-1] * settings.threads,
                two_phase=settings.published is not None,
                schedule=settings.schedule(),
            ),
            lambda group: self.hypers[group],
            recorder=recorder,
        )
        self.published: list[Tensor] = []
        groups = []
        for sizes in settings.sizes:
            parameters = [Parameter(self._initial(numel), settings.published_format) for numel in sizes]
            groups.append(Group(parameters))
        self.reference = Trainer(groups)
        shards: list[Shard] = []
        for group, of_group in enumerate(groups):
            for parameter in of_group.parameters:
                shards.append(self._shard(len(shards), group, parameter))
        self.engine.layout.add_shards(shards)

    def _initial(self, numel: int) -> npt.NDArray[np.float32]:
        return self.random.standard_normal(numel).astype(np.float32)

    def _shard(self, index: int, group: int, parameter: Parameter) -> Shard:
        published = to_tensor(parameter.published)
        self.published.append(published)
        numel = published.numel()
        upper, master = None, to_tensor(parameter.master)
        if self.settings.published_format == "split":
            halves = split(parameter.master)
            upper, master = UpperHalves(to_tensor(halves.upper)), to_tensor(halves.remainder)
        return Shard(
            index,
            f"shard {index}",
            group,
            numel,
            self.settings.gradient_dtype,
            self.settings.published_dtype,
            master,
            torch.zeros(numel),
            torch.zeros(numel),
            lambda: published,
            upper=upper,
        )

    @property
    def shards(self) -> list[Shard]:
        return self.engine.shards

    def gradient(self, shard: Shard, scale: float = 1.0, poison: float | None = None) -> npt.NDArray[Any]:
        """Random, in the rig's format; ``poison`` (NaN or an infinity) goes to one element."""
        values = (scale * self.random.standard_normal(shard.numel)).astype(np.float32)
        if poison is not None and shard.numel:
            values[self.random.integers(shard.numel)] = poison
        return narrow(values, FORMAT_OF[self.settings.gradient_dtype])

    def arrive(self, shard: Shard, gradient: npt.NDArray[Any], *, in_backward: bool = True) -> None:
        self.engine.arrive(shard, to_tensor(gradient), in_backward=in_backward)

    def backward(self, scale: float = 1.0, poison: float | None = None) -> dict[int, npt.NDArray[Any]]:
        """All gradients, in the order of backward; ``poison`` goes to the last."""
        gradients = {}
        for shard in reversed(self.shards):
            gradients[shard.index] = self.gradient(shard, scale, None if shard.index else poison)
            self.arrive(shard, gradients[shard.index])
        return gradients

    def set_hyper(self, group: int, hyper: GroupHyper) -> None:
        self.hypers[group] = hyper

    def step_both(
        self,
        gradients: dict[int, npt.NDArray[Any]],
        *,
        unscale: float = 1.0,
        max_grad_norm: float | None = None,
    ) -> tuple[Verdict, ReferenceVerdict]:
        """Verdict and apply in the engine, the whole step in the reference. Compares the verdicts, not the state."""
        for group, hyper in zip(self.reference.groups, self.hypers, strict=True):
            group.lr, group.betas, group.eps = hyper.lr, (hyper.beta1, hyper.beta2), hyper.eps
            group.weight_decay, group.l2 = hyper.weight_decay, hyper.l2
        self.reference.max_grad_norm = max_grad_norm
        expected = self.reference.step([gradients.get(shard.index) for shard in self.shards], unscale)
        before = [to_numpy(published) for published in self.published]
        verdict = self.engine.decide(unscale=unscale, max_grad_norm=max_grad_norm)
        for published, old in zip(self.published, before, strict=True):
            assert_bits("published parameter before apply()", to_numpy(published), old)
        assert verdict.found_inf == expected.found_inf
        if not expected.found_inf:
            assert verdict.grad_norm == expected.grad_norm
            assert verdict.clip_coefficient == expected.clip_coefficient
            assert np.float32(verdict.gradient_factor) == np.float32(expected.gradient_factor)
        self.engine.apply(verdict)
        return verdict, expected

    def check(self) -> None:
        """State, published parameters and step counts are those of the reference."""
        self.engine.tail.settle()
        for shard, published, parameter in zip(self.shards, self.published, self.reference.parameters, strict=True):
            assert_bits(f"{shard.name}: master", to_numpy(shard.read_masters()), parameter.master)
            assert_bits(f"{shard.name}: exp_avg", to_numpy(shard.exp_avg), parameter.exp_avg)
            assert_bits(f"{shard.name}: exp_avg_sq", to_numpy(shard.exp_avg_sq), parameter.exp_avg_sq)
            assert_bits(f"{shard.name}: published", to_numpy(published), parameter.published)
            assert shard.steps == parameter.step
        stats = self.engine.stats()
        assert stats["buckets_speculated"] == sum(stats[name] for name in COUNTERS)
        assert stats["steps"] == self.reference.steps
        assert stats["skipped_steps"] == self.reference.skipped_steps
        assert not self.engine.is_filling

    def check_published_unchanged(self) -> None:
        """Whatever was speculated or is not settled, readers see the parameters of the last finished step."""
        for published, parameter in zip(self.published, self.reference.parameters, strict=True):
            assert_bits("published parameter during backward", to_numpy(published), parameter.published)


def journal_codes_of(width: int) -> AbstractContextManager[Any]:
    """All codes have this many bytes."""

    def choose(chooser: JournalWidth, work: _native.BucketWork, next_step: int) -> int:
        chooser.width = width
        return width

    return mock.patch.object(JournalWidth, "choose", choose)


@contextmanager
def rig(
    settings: Settings, *, width: int | None = None, arena: float | None = None, recorder: Recorder | None = None
) -> Iterator[Rig]:
    """``width``: all codes have this many bytes. ``arena``: bytes per parameter left for escapes (None: as built)."""
    with ExitStack() as stack:
        if width is not None:
            stack.enter_context(journal_codes_of(width))
        if arena is not None:
            per_param = (width or 2) + arena
            stack.enter_context(
                mock.patch("superoffload.engine.layout.reserved_bytes", lambda numel: int(per_param * numel))
            )
        made = Rig(settings, recorder)
        stack.callback(made.engine.close)
        yield made
