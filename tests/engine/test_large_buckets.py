"""Large buckets on several real threads have the reference's bits; the simulator and the fuzzer try all schedules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from superoffload.engine.bucket import GroupHyper
from tests.support.engine_rig import Rig, Settings, rig

HYPER = GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1)
# What happens in a step besides its gradients.
KINDS = ("plain", "plain", "clip", "spike", "nan", "new hyper-parameters", "other factor", "abandon")


def step(made: Rig, kind: str) -> None:
    gradients = made.backward(1e3 if kind == "spike" else 1.0, math.nan if kind == "nan" else None)
    made.check_published_unchanged()
    if kind == "new hyper-parameters":
        made.set_hyper(0, replace(made.hypers[0], lr=made.hypers[0].lr / 2))
    if kind == "abandon":
        made.engine.abandon()
    else:
        unscale = -0.25 if kind == "other factor" else 1.0
        made.step_both(gradients, unscale=unscale, max_grad_norm=5.0 if kind == "clip" else None)


@pytest.mark.parametrize(
    ("mode", "gradient_dtype", "published", "l2", "split"),
    [
        ("always", torch.float32, None, False, True),
        ("always", torch.bfloat16, None, True, False),
        ("adaptive", torch.float16, None, False, True),
        ("never", torch.float16, 1.0, True, False),
        ("never", torch.bfloat16, 0.5, False, True),
        ("always", torch.bfloat16, 1.0, False, False),
    ],
)
def test_several_chunks_on_several_threads(
    mode: str, gradient_dtype: torch.dtype, published: float | None, *, l2: bool, split: bool
) -> None:
    """Each kind of step where the one before has left nothing, and where it has left masters to settle."""
    described = Settings(
        [[100_000, 7], [66_000]], gradient_dtype, torch.bfloat16, mode, 1 << 17, threads=3, published=published,
        hyper=replace(HYPER, l2=l2), split=split,
    )  # fmt: skip
    with rig(described) as made:
        for settled in (False, True):
            for kind in KINDS:
                step(made, kind)
                if settled:
                    made.check()
                else:
                    made.check_published_unchanged()
        stats = made.engine.stats()
        assert (stats["buckets_two_phase"] > 0) == (published is not None)
        assert stats["skipped_steps"] == 2
        assert (stats["buckets_speculated"] > 0) == (mode != "never")
