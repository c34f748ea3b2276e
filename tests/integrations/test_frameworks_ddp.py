"""Accelerate and Trainer wrap a model in DDP after its optimizer was made, which follows the reductions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.optimizer.frameworks import reducing
from tests.support.optional_packages import needs
from tests.support.rank_processes import loss_of, net, on_ranks

pytestmark = needs("accelerate")


@contextlib.contextmanager
def accelerator_of(**options: Any) -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        try:
            yield Accelerator(cpu=True, **options)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def prepared(folder: str, delivery: str) -> Any:
    """Trains with accumulation; goes back to a checkpoint once. Returns digests of the state and our counters."""
    found: dict[str, Any] = {}
    for speculation in ("always", "never"):
        with accelerator_of(gradient_accumulation_steps=2) as accelerator:
            inner = net(torch.float32)
            module = inner if delivery == "on_demand" else None
            options: Any = {"delivery": delivery, "module": module, "bucket_numel": 1024}
            made = AdamW(inner.parameters(), max_grad_norm=5.0, speculation=speculation, **options)
            model, optimizer = accelerator.prepare(inner, made)
            assert isinstance(model, DistributedDataParallel)
            for seed in range(10):
                if seed == 4:
                    accelerator.save_state(f"{folder}/{speculation}")
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, seed))
                    optimizer.step()
                    optimizer.zero_grad()
                if seed == 7:
                    accelerator.load_state(f"{folder}/{speculation}")
            found[speculation] = made.state_digests(), made.stats()
            made.close()
    assert found["always"][0] == found["never"][0]
    return found["always"]


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_accelerate(delivery: str, tmp_path: Path) -> None:
    (first, stats), (second, _) = on_ranks(2, prepared, str(tmp_path), delivery)
    assert first == second
    assert (
        stats["steps"] == 5 and stats["buckets_committed"] + stats["buckets_replayed"] >= 3 * stats["buckets_stepped"]
    )


def as_before(case: str) -> None:
    """Where gradients cannot be taken from DDP, the optimizer reads them at ``step()``."""
    with accelerator_of() as accelerator:
        inner = net(torch.float32)
        of_case: dict[str, Any] = {"fp32 sums": {"accumulate_dtype": "fp32"}, "never": {"speculation": "never"}}
        options = {"speculation": "always", "bucket_numel": 1024, **of_case.get(case, {})}
        others = [torch.nn.Parameter(torch.ones(4))] if case == "a part of the parameters" else []
        with AdamW([*inner.parameters(), *others], **options) as made:
            models = [accelerator.prepare(inner)]
            if case == "a hook" or (case == "a hook on one rank" and dist.get_rank() == 1):
                models[0].register_comm_hook(dist.group.WORLD, allreduce_hook)
            elif case == "two models":
                models.append(DistributedDataParallel(inner))
            for seed in range(3):
                loss_of(models[0], seed).backward()
                made.step()
                made.zero_grad()
            assert reducing([]) is None, "an optimizer whose parameters are all frozen"
            stats = made.stats()
            assert stats["buckets_speculated"] == 0 < stats["buckets_stepped"]


@pytest.mark.parametrize(
    "case", ["a hook", "a hook on one rank", "a part of the parameters", "two models", "fp32 sums", "never"]
)
def test_what_keeps_an_optimizer_as_it_is(case: str) -> None:
    on_ranks(2, as_before, case)


def by_trainer(folder: str) -> list[Any]:
    from tests.support.hugging_face import end, logs_of, model_of, trainer_of

    runs = []
    for number, ours in enumerate(["always", "never", None]):
        with accelerator_of():
            options = {"max_steps": 4, "gradient_accumulation_steps": 2}
            trainer = trainer_of(Path(folder) / str(number), model_of(), ours, "all", **options)
            trainer.train()
            runs.append((logs_of(trainer), end(trainer) if ours else None))
    return runs


@needs("transformers")
def test_trainer(tmp_path: Path) -> None:
    first, second = on_ranks(2, by_trainer, str(tmp_path))
    (ours, state), (_, never), (theirs, _) = first
    assert state == never == second[0][1]
    assert [entry["loss"] for entry in ours] == pytest.approx([entry["loss"] for entry in theirs], rel=2e-3)
    assert [entry["superoffload/step_speculated_share"] for entry in ours] == [0, 1, 1, 1]
