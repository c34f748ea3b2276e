"""Faults that tests plant in an optimizer inside a rank. None of this can be switched on in the package itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from superoffload import AdamW, _native
from superoffload.distributed.session import RankSession
from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.engine.verdict import Verdict
from tests.support.rank_processes import BF16, flat_mesh, net, optimizer_of, replica_mesh, shard, tokens_of

Operation = _native.Operation


def engine_of(optimizer: Any) -> Engine:
    """That of AdamW, or of an optimizer of DeepSpeed's that is ours."""
    found: Engine = optimizer._engine if isinstance(optimizer, AdamW) else optimizer.parts.driver.engine
    return found


def session_of(optimizer: Any) -> Any:
    return optimizer._ranks.session if isinstance(optimizer, AdamW) else optimizer.parts.ranks.session


def step_of(optimizer: AdamW) -> int:
    """The step that is running, from 1."""
    session = session_of(optimizer)
    return session._call if isinstance(session, RankSession) else int(optimizer.stats()["steps"]) + 1


@contextmanager
def skip_publish(optimizer: AdamW, step: int, rank: int, place: int = 0) -> Iterator[None]:
    """From that step on, one bucket's shadow is not copied to the parameters of one rank."""
    engine = engine_of(optimizer)
    link = engine.link
    deliver = link.deliver

    def lossy(bucket: Bucket, after: _native.Completion) -> _native.Completion:
        if dist.get_rank() == rank and step_of(optimizer) >= step and bucket is engine.buckets[place]:
            return after
        return deliver(bucket, after)

    with mock.patch.object(link, "deliver", lossy):
        yield


@contextmanager
def apply_twice(optimizer: AdamW, step: int, rank: int) -> Iterator[None]:
    """In that step, one bucket of one rank is stepped a second time."""
    engine = engine_of(optimizer)
    finish = engine.finisher.finish

    def doubled(bucket: Bucket, factor: float) -> None:
        finish(bucket, factor)
        if dist.get_rank() == rank and step_of(optimizer) == step and bucket is engine.buckets[0]:
            engine.executor.wait(bucket)
            engine.executor.freeze(bucket, factor)
            engine.executor.submit(bucket, Operation.step)

    with mock.patch.object(engine.finisher, "finish", doubled):
        yield


@contextmanager
def drop_clip(optimizer: Any, step: int, rank: int) -> Iterator[None]:
    """From that step on, one rank does not clip."""
    engine = engine_of(optimizer)
    apply = engine.apply

    session = session_of(optimizer)
    count: Callable[..., None] = session.count if session is not None else lambda **_: None

    def factor_of(factor: float) -> float:
        here = dist.get_rank() == rank and step_of(optimizer) >= step
        if not here:
            return factor
        if isinstance(optimizer, AdamW):
            return float(optimizer._permanent.clipping.unscale)
        return 1.0 / float(optimizer.loss_scale)

    def unclipped(verdict: Verdict, **options: bool) -> None:
        apply(verdict._replace(gradient_factor=factor_of(verdict.gradient_factor)), **options)

    def told(*, applied: bool, factor: float) -> None:  # what the session is told is what was done
        count(applied=applied, factor=factor_of(factor))

    with mock.patch.object(engine, "apply", unclipped), mock.patch.object(session, "count", told):
        yield


@contextmanager
def swap_shards(optimizer: AdamW, step: int, rank: int, name: str = "layers.0.0.weight") -> Iterator[None]:
    """After that step, two ranks have each other's published shard of one parameter."""
    engine = engine_of(optimizer)
    apply = engine.apply

    def swapped(verdict: Verdict, **options: bool) -> None:
        apply(verdict, **options)
        if step_of(optimizer) == step:
            mine = next(shard for shard in engine.shards if shard.name == name).target()
            all_of_them: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_of_them, mine.clone())
            theirs = all_of_them[{rank: 0, 0: rank}.get(dist.get_rank(), dist.get_rank())]
            length = min(mine.numel(), theirs.numel())
            mine[:length] = theirs[:length]

    with mock.patch.object(engine, "apply", swapped):
        yield


def nothing(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


# Planted in the training loop instead, on all ranks, since they are about collectives: see the loops of the tests.
IN_THE_LOOP = ("reduce_early", "stale_parameters")

FAULTS: dict[str, Any] = {
    "none": nothing,
    "skip_publish": skip_publish,
    "skip_last_publish": partial(skip_publish, place=-1),
    "apply_twice": apply_twice,
    "drop_clip": drop_clip,
    "swap_shards": swap_shards,
    "swap_mesh_shards": partial(swap_shards, name="blocks.0.down.weight"),
    "swap_transformer_shards": partial(swap_shards, name="blocks.0.mlp.down.weight"),
    **dict.fromkeys(IN_THE_LOOP, nothing),
}


def first_error(optimizer: AdamW, backward: Callable[[int], None], steps: int) -> list[Any]:
    """[the number of the step whose step() raised, the message]; [steps, ""] if none did."""
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        backward(number)
        try:
            optimizer.step()
        except Exception as error:
            return [number, f"{type(error).__name__}: {error}"]
    return [steps, ""]


def train_until_error(fault: str, step: int, rank: int, replicas: bool, check: Any, steps: int = 60) -> list[Any]:
    model: Any = shard(net(torch.bfloat16), replica_mesh() if replicas else flat_mesh(), BF16)

    def backward(number: int) -> None:
        if fault == "stale_parameters" and number == step:
            model.set_reshard_after_backward(False)
        model.loss(tokens_of(number, dist.get_rank())).backward()

    with optimizer_of(model, max_grad_norm=0.5, rank_check=check) as optimizer, FAULTS[fault](optimizer, step, rank):
        return first_error(optimizer, backward, steps)


def assert_found(results: list[Any], text: str, earliest: int, latest: int) -> None:
    """The same error on every rank, in one of these steps."""
    assert len({message for _, message in results}) == 1
    number, message = results[0]
    assert message.startswith("RankError: ranks have diverged: ") and text in message, message
    assert earliest <= number <= latest
