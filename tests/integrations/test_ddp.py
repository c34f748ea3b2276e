"""DistributedDataParallel: edits of reduced gradients, sums that come back late, models that Accelerate wraps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.integrations import ddp
from superoffload.links.cuda.link import CudaLink, CudaOptions
from superoffload.optimizer.frameworks import reducing
from tests.support.adamw_training import grads_of
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, garbage_like, on_host
from tests.support.optional_packages import needs
from tests.support.rank_processes import loss_of, net, on_ranks


def optimizer_told(model: nn.Module, told: bool, **options: Any) -> AdamW:
    """``told``: it has its communication hook there; else gradients are read at step()."""
    params = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0, **options}
    return AdamW(params, model=model if told else None, **options)


def listed(model: Any) -> None:
    torch._foreach_mul_(grads_of(model), 0.5)


def clipped_by_hand(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def first_replaced_last_removed(model: Any) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    params[0].grad = 2 * params[0].grad
    params[-1].grad = None


def view_edited(model: Any) -> None:
    grads_of(model)[1].view(-1)[:1].add_(1.0)


EDITS = (listed, clipped_by_hand, first_replaced_last_removed, view_edited)


def ddp_edits(view: bool, static: bool) -> None:
    """The third step of each edit has two backwards, but for a static graph. Gradients that nothing has edited are not
    compared, so on a GPU nothing is copied down twice: but for the first of a static graph, which DDP has put in place
    before the optimizer can look."""
    digests, counts = [], []
    for told, edits in ((True, True), (True, False), (False, True)):
        found = []
        inner = net(torch.float32)
        model = DistributedDataParallel(inner, bucket_cap_mb=0.005, gradient_as_bucket_view=view, static_graph=static)
        with optimizer_told(model, told) as optimizer:
            for step in range(3 * len(EDITS)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if step % 3 == 2 and not static:
                    loss_of(model, 40).backward()
                if edits and step % 3:
                    with torch.no_grad():
                        EDITS[step // 3](model)
                packer = optimizer._engine.packer
                with mock.patch.object(packer, "gradient_is", side_effect=packer.gradient_is) as compared:
                    optimizer.step()
                if told and not edits and step % 3 != 2:
                    counts.append(compared.call_count)
                found.append(optimizer.state_digests())
            assert not told or optimizer.stats()["buckets_speculated"] > 0
        digests.append(found)
    with_hook, unedited, without_hook = digests
    assert with_hook == without_hook
    assert with_hook[1] != unedited[1]
    assert (counts[0] > 0) == static and not any(counts[1:])


@pytest.mark.parametrize(("view", "static"), [(False, False), (True, False), (False, True)])
def test_edits_of_reduced_gradients_are_noticed(view: bool, static: bool) -> None:
    """As without our communication hook, where gradients are read at step()."""
    on_ranks(2, ddp_edits, view, static)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, *heads: int) -> Tensor:
        return sum((self.heads[head](self.body(x)) for head in heads), start=torch.zeros(()))


def left_alone(view: bool) -> None:
    """A head that only a backward without synchronization has used: DDP leaves its gradient as it is."""
    digests = []
    for told in (True, False):
        model: Any = DistributedDataParallel(
            TwoHeads(), bucket_cap_mb=0.0001, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        with optimizer_told(model, told, rank_check="off") as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                values = torch.full((2, 6), 0.1 * (step + 1))
                with model.no_sync():
                    model(values, step % 2).square().mean().backward()
                model(values, 0).square().mean().backward()
                optimizer.step()
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_ddp_leaves_alone_are_stepped_as_they_are(view: bool) -> None:
    on_ranks(2, left_alone, view)


# ---- sums that come back late, on streams of gloo's own --------------------------------------------------------------


STEPS = 4
LATE = 20_000.0  # microseconds


class Streams:
    """What ddp.py uses of ``torch.cuda``, over the fake driver. Backward runs on a stream that is not the default."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.default = FakeStream(self, fake.make_stream())
        self.backward = FakeStream(self, fake.current)
        self.made: list[FakeStream] = []

    def make(self, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(self, self.fake.make_stream()))
        return self.made[-1]

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.fake.current = self.fake.current, stream.handle
        yield
        self.fake.current = before

    @contextmanager
    def installed(self) -> Iterator[None]:
        """``torch.cuda`` has these streams, and tensors of the CPU count as tensors of the GPU."""
        with ExitStack() as stack:
            for target, name, value in (
                (torch.cuda, "Stream", self.make),
                (torch.cuda, "stream", self.use),
                (torch.cuda, "default_stream", lambda device: self.default),
                (torch.cuda, "current_stream", lambda device: FakeStream(self, self.fake.current)),
                (ddp, "_on_gpu", lambda param: True),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            yield

    def finish(self) -> None:
        for stream in (self.default, self.backward, *self.made):
            self.fake.synchronize(stream.handle)


class FakeStream:
    def __init__(self, streams: Streams, handle: int) -> None:
        self.streams, self.handle = streams, handle

    def wait_stream(self, other: FakeStream) -> None:
        driver = self.streams.fake.driver
        event = ctypes.c_void_p()
        calls = [
            driver.cuEventCreate(ctypes.byref(event), 2),
            driver.cuEventRecord(event, ctypes.c_void_p(other.handle)),
            driver.cuStreamWaitEvent(ctypes.c_void_p(self.handle), event, 0),
        ]
        assert calls == [0, 0, 0]


def trained(streams: Streams | None = None) -> dict[str, str]:
    model = DistributedDataParallel(net(torch.float32), bucket_cap_mb=0.005)
    params = [param for param in model.parameters() if param.requires_grad]
    options: dict[str, Any] = {"speculation": "always", "threads": 1, "bucket_numel": 4096, "rank_timeout": 20.0}
    options["rank_check"] = "off"  # its early full check reads parameters without the stand-in's stream
    with AdamW(params, model=model, max_grad_norm=0.5, **options) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if streams is not None:
                streams.finish()
        return optimizer.state_digests()


def with_late_sums(copied_on: str) -> bool:
    """In a rank: the state is that of a run whose sums are there at once. ``copied_on``: whose stream has the copy."""
    with on_host():
        expected = trained()
    fake = Fake()
    streams = Streams(fake)
    device = FakeDevice(fake)
    kept: list[Tensor] = []

    def late(group: Any, bucket: Any) -> Any:
        """Reduces as gloo does; the sum is copied back late, and the future is done before that has run."""
        buffer = allreduce_hook(group, bucket).wait()
        total = buffer.clone()
        buffer.view(torch.uint8).copy_(garbage_like(buffer))
        kept.append(buffer)
        stream = getattr(streams, copied_on).handle
        fake.sleep(LATE, stream)
        fake.write(stream, buffer, total)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    made: list[CudaLink] = []

    def link_for(params: Sequence[Tensor], **_: Any) -> CudaLink:
        made.append(CudaLink(device, CudaOptions(image=IMAGE, timeout_seconds=60.0, library=fake.library)))
        return made[-1]

    with (
        mock.patch("superoffload.optimizer.adamw_parts.link_for", link_for),
        mock.patch.object(default_hooks, "allreduce_hook", late),
        streams.installed(),
    ):
        try:
            return trained(streams) == expected
        finally:
            streams.finish()
            made[0].close()
            for handle in device.streams:
                fake.synchronize(handle)


@pytest.mark.parametrize("copied_on", ["default", "backward"])
def test_sums_that_gloo_copies_back_late_are_waited_for(fake: Fake, copied_on: str) -> None:
    """On the default stream of gloo's thread, as torch 2.6 to 2.10 have it, or on that of the reader."""
    assert on_ranks(2, with_late_sums, copied_on) == [True, True]


# ---- Accelerate wraps a model after its optimizer was made, which follows the reductions -----------------------------


@contextmanager
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


@needs("accelerate")
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


@needs("accelerate")
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


@needs("transformers", "accelerate")
def test_trainer(tmp_path: Path) -> None:
    first, second = on_ranks(2, by_trainer, str(tmp_path))
    (ours, state), (_, never), (theirs, _) = first
    assert state == never == second[0][1]
    assert [entry["loss"] for entry in ours] == pytest.approx([entry["loss"] for entry in theirs], rel=2e-3)
    assert [entry["superoffload/step_speculated_share"] for entry in ours] == [0, 1, 1, 1]
