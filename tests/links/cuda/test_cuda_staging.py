"""New parameters that travel before the verdict: not seen until the commit, discarded by everything else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.bucket import Bucket
from superoffload.links.cuda.link import CudaLink
from tests.support.adamw_training import batch
from tests.support.fake_cuda import Fake, LateLink, on_fake_device, on_host
from tests.support.fake_cuda_training import LATE, deep_model

Look = Callable[[], None]
Outcome = tuple[dict[str, str], dict[str, float | int]]
FATES = ("commit", "clip", "skip", "abandon", "second backward", "edit", "new lr", "set to none")


def backward(fate: str, model: nn.Module, seed: int) -> None:
    """A gradient that is large, or not finite, comes last, so that all others have been speculated on."""
    factor = {"clip": 1e3, "skip": torch.nan}.get(fate, 1.0)
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * factor)
    batch(model, seed, scale=0.1).backward()
    handle.remove()


def end_step(fate: str, model: nn.Module, optimizer: AdamW, seed: int) -> None:
    """From a finished backward on."""
    first = next(model.parameters())
    optimizer.param_groups[0]["lr"] = 2e-2 if fate == "new lr" else 1e-2
    if fate == "second backward":
        batch(model, seed + 100).backward()
    elif fate == "edit":
        assert first.grad is not None
        first.grad.mul_(0.5)
    elif fate == "set to none":
        first.grad = None
    if fate != "abandon":
        optimizer.step()


def train_with(fates: list[str], look: Look, synchronize: Look, settings: dict[str, Any]) -> Outcome:
    """``look`` is called whenever parameters must be those of the last step."""
    model = deep_model(torch.bfloat16)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: look())
    model.register_forward_pre_hook(lambda *_: synchronize())
    options: dict[str, Any] = {"lr": 1e-2, "threads": 2, "bucket_numel": 1024, **settings}
    if options.get("delivery") == "on_demand":
        options["module"] = model
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: synchronize())
    with AdamW(model.parameters(), **options) as optimizer:
        for seed, fate in enumerate(fates):
            optimizer.zero_grad()
            backward(fate, model, seed)
            end_step(fate, model, optimizer, seed)
        optimizer.synchronize()
        synchronize()
        return optimizer.state_digests(), optimizer.stats()


class Watched(LateLink):
    """Parameters may change from the first delivery of a step on, until its last one is visible."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.old: dict[int, tuple[Tensor, Tensor]] = {}

    def stage(self, bucket: Bucket, after: Any) -> None:
        for piece in bucket.pieces:
            target = piece.shard.target()
            self.old[piece.shard.index] = target, target.clone()
        super().stage(bucket, after)

    def deliver(self, bucket: Bucket, after: Any) -> Any:
        self.look()
        for piece in bucket.pieces:
            self.old.pop(piece.shard.index, None)
        return super().deliver(bucket, after)

    def step_ended(self, *, whole: bool) -> None:
        self.look()
        super().step_ended(whole=whole)
        self.old.clear()

    def look(self) -> None:
        """At random moments, now and behind what the current stream has to do."""
        fake = self.fake_device.fake
        if random.random() < 0.3:
            time.sleep(random.random() * 2e-3)
        for target, before in self.old.values():
            assert torch.equal(target, before), "a new parameter shows before the verdict"
        if self.old:
            fake.read(fake.current, *random.choice(list(self.old.values())))


@pytest.mark.parametrize(("seed", "master", "delivery"), [(0, "fp32", "eager"), (1, "split", "on_demand")])
def test_what_was_sent_early_is_not_seen_before_the_commit(fake: Fake, seed: int, master: str, delivery: str) -> None:
    fates = ["commit", "commit", *random.Random(seed).sample(FATES, len(FATES)), "commit"]
    settings: dict[str, Any] = {"speculation": "always", "max_grad_norm": 1.0, "delivery": delivery}
    settings["master_dtype"] = master
    with on_host():
        expected, _ = train_with(fates, lambda: None, lambda: None, settings)
    fake.delays(seed, LATE)
    with on_fake_device(fake, Watched) as links:

        def look() -> None:
            if links:
                links[0].look()  # type: ignore[attr-defined]  # a Watched link has it

        found, stats = train_with(fates, look, fake.synchronize, settings)
        assert stats["bytes_up_early"] > 0, "nothing was sent early"
        assert found == expected
    assert fake.mismatches == 0


class Hasty(Watched):
    """Sends the parameters themselves before the verdict."""

    def stage(self, bucket: Bucket, after: Any) -> None:
        super().stage(bucket, after)
        after.wait()
        CudaLink.deliver(self, bucket, after).wait()


def test_what_is_seen_too_early_is_noticed(fake: Fake) -> None:
    with on_fake_device(fake, Hasty) as links, pytest.raises(AssertionError, match="shows before the verdict"):

        def look() -> None:
            for link in links:
                link.look()  # type: ignore[attr-defined]  # these links are Watched

        train_with(["commit"] * 4, look, fake.synchronize, {"speculation": "always"})
