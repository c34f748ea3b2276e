"""Memory of the device for parameters on their way up: where it comes from, how much it is, when it goes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.links.cuda.blocks import early_buckets
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.timeline import PROCESSORS, read_trace
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import LATE, blocks_of, count_gradients, deep_model, out_of_memory, run, training
from tests.support.fp32_gradients import needs_grad_dtype

Outcome = tuple[dict[str, str], int]


def large_last(dtype: torch.dtype) -> nn.Sequential:
    """The last gradient of backward is larger than all others together, and spans buckets."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 32), *layers, nn.Linear(32, 4)).to(dtype)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay, in buckets that are filled beside those of the weights."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("make_model", "groups", "bucket_numel", "dtype"),
    [
        (deep_model, nn.Module.parameters, 1024, torch.bfloat16),
        (large_last, two_groups, 5000, torch.float32),
    ],
)
def test_blocks_and_gradients_never_exceed_all_gradients(
    fake: Fake, make_model: Any, groups: Any, bucket_numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as an allocator does, whenever a gradient or a block appears; staging that is always there aside. What
    record_stream was called for counts until the end of the step."""
    monkeypatch.setattr(MasterUpdates, "compares_on_device", False)  # no more sums of bits
    model = make_model(dtype)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    with on_fake_device(fake) as links:
        all_gradients = count_gradients(model, links)
        with AdamW(groups(model), speculation="always", threads=1, bucket_numel=bucket_numel) as optimizer:
            memory = links[0].fake_device.memory
            most = 0
            for seed in range(4):
                optimizer.zero_grad()
                always = memory.peak = memory.active
                batch(model, seed).backward()
                most = max(most, blocks_of(optimizer))
                optimizer.step()
                assert memory.peak - always <= all_gradients
                if seed > 0:  # in the first step sums of bits go, too, which were taken at construction
                    assert memory.active == always, "everything goes with the step"
            assert (most > 0) == bool(early_buckets(optimizer._engine.buckets))
            if bucket_numel == 1024 and make_model is deep_model:
                assert most > all_gradients / 2, "most of the gradients' memory is used again"


# ---- delivery on demand, and the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["always", "never"])
def test_delivery_on_demand_leaves_none_to_the_next_forward(fake: Fake, mode: str, tmp_path: Path) -> None:
    """What has gone up is delivered at once, and what goes up later does without. A timeline knows both."""
    model, trace = deep_model(torch.bfloat16), tmp_path / "trace.json"
    used: list[int] = []
    options: dict[str, Any] = {"speculation": mode, "threads": 2, "bucket_numel": 1024, "delivery": "on_demand"}
    fake.delays(3, LATE)
    with on_fake_device(fake), AdamW(model.parameters(), module=model, trace=trace, **options) as optimizer:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: fake.synchronize())
        for seed in range(4):
            optimizer.zero_grad()
            batch(model, seed).backward()
            used.append(blocks_of(optimizer))
            optimizer.step()
            assert blocks_of(optimizer) == 0
        assert used[-1] > 0
        committed = optimizer.stats()["buckets_committed"]
    fates = [event["args"].get("fate") for event in read_trace(trace) if event.get("cat") == PROCESSORS]
    assert fates.count("committed") == committed and (committed > 0) == (mode != "never")
    assert fake.mismatches == 0


def throw_away(model: nn.Module, optimizer: AdamW) -> None:
    model.zero_grad()
    optimizer.step()


ENDS: dict[str, Callable[[nn.Module, AdamW], object]] = {
    "skip": lambda model, optimizer: optimizer.step(),
    "abandon": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "close": lambda model, optimizer: optimizer.close(),
    "thrown away": throw_away,
}


@pytest.mark.parametrize("end", ENDS)
def test_all_of_them_go_when_a_step_ends_with_nothing(fake: Fake, end: str) -> None:
    with training(fake, model=deep_model(torch.bfloat16)) as (model, optimizer):
        before = optimizer.state_digests()
        optimizer.zero_grad()
        handle = next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
        batch(model, 2).backward()
        handle.remove()
        assert blocks_of(optimizer) > 0
        ENDS[end](model, optimizer)
        assert blocks_of(optimizer) == 0
        optimizer.zero_grad()
        fake.synchronize()
        assert optimizer.state_digests() == before and fake.mismatches == 0


# ---- streams --------------------------------------------------------------------------------------------------------


Setting = Callable[[Fake, LateLink], None]


def on_two_streams(fake: Fake, seed: int, setting: Setting, *, side: int | None = None) -> Outcome:
    """Backward runs on a stream ``side`` that is not the one of step() and forward; blocks are of its memory."""
    main = fake.current
    model = deep_model(torch.bfloat16)
    options: dict[str, Any] = {"speculation": "always", "threads": 2, "bucket_numel": 1024, "max_grad_norm": 0.5}
    with on_fake_device(fake) as links, AdamW(model.parameters(), **options) as optimizer:
        setting(fake, links[0])
        fake.delays(seed, LATE)
        for step in range(4):
            optimizer.zero_grad()
            loss = batch(model, step)
            fake.current = side or main
            loss.backward()
            fake.current = main
            optimizer.step()
            fake.synchronize(main)  # not the other one, on which others go on with the blocks
        assert blocks_of(optimizer) == 0
        digests = optimizer.state_digests()
        fake.synchronize(links[0].fake_device.allocates_on or side)
        mismatches = fake.mismatches
        fake.reset()
        return digests, mismatches


def steps_on_host() -> dict[str, str]:
    return run(partial(train, seeds=range(4)), make=deep_model, max_grad_norm=0.5).digests


def test_a_block_goes_behind_the_kernel_that_reads_it(fake: Fake) -> None:
    expected, side = (steps_on_host(), 0), fake.make_stream()

    def drops_waits(fake: Fake, link: LateLink) -> None:
        fake.drop_waits(side, link.roles["up"])

    assert all(on_two_streams(fake, seed, lambda *_: None, side=side) == expected for seed in range(2))
    assert any(on_two_streams(fake, seed, drops_waits, side=side) != expected for seed in range(6))


def test_gradients_in_memory_of_another_stream_go_behind_the_pack_kernel(fake: Fake) -> None:
    """It was allocated for a stream that does not wait for ours, as communication does."""
    expected = steps_on_host(), 0

    def told(fake: Fake, link: LateLink) -> None:
        link.fake_device.allocates_on = fake.make_stream()

    def forgotten(fake: Fake, link: LateLink) -> None:
        told(fake, link)
        drops: Any = link.fake_device
        drops.release = lambda gradients, stream: None

    assert all(on_two_streams(fake, seed, told) == expected for seed in range(2))
    assert any(on_two_streams(fake, seed, forgotten) != expected for seed in range(6))


@pytest.mark.parametrize("waits", [True, False])
def test_a_block_goes_behind_the_copy_down(fake: Fake, waits: bool) -> None:
    """The step ends while gradients are on their way, as where one of them was taken back and no other came."""
    gradients = deep_model(torch.bfloat16)
    with training(fake, model=deep_model(torch.bfloat16), speculation="never") as (model, optimizer):
        gradients.load_state_dict(model.state_dict())
        batch(gradients, 2).backward()
        link: Any = optimizer._engine.link
        optimizer.zero_grad()
        fake.sleep(300_000, link.roles["down"])  # longer than backward takes here
        if not waits:
            fake.drop_waits(link.roles["current"], link.roles["down"])
        batch(model, 2).backward()
        buckets = list(link._blocks._held)
        link.step_ended(whole=True)
        came = []
        names = {id(p): n for n, p in model.named_parameters()}
        params = dict(gradients.named_parameters())
        for bucket in buckets:
            bucket.arrival.wait()
            for piece in bucket.pieces:
                grad = params[names[id(optimizer.param_groups[0]["params"][piece.shard.index])]].grad
                assert grad is not None
                packed = bucket.gradient[piece.offset : piece.offset + piece.numel]
                came.append(torch.equal(packed, grad.view(-1)[piece.start : piece.start + piece.numel]))
        assert len(came) > 10 and all(came) == waits


def digests_with(fake: Fake, at_step: Callable[[int, LateLink, AdamW], None], **options: Any) -> dict[str, str]:
    def program(model: nn.Module, optimizer: AdamW) -> None:
        link: Any = optimizer._engine.link
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            at_step(seed, link, optimizer)
            optimizer.step()

    found = run(program, make=deep_model, fake=fake, **options)
    assert fake.mismatches == 0
    return found.digests


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return run(train, make=deep_model).digests


def test_no_more_than_there_was_room_for(fake: Fake, expected: dict[str, str]) -> None:
    used: list[int] = []
    room = 10_000

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        link.fake_device.free = room if seed == 0 else 1 << 30  # looked at behind the first step only
        used.append(blocks_of(optimizer))

    fake.delays(1, LATE)
    assert digests_with(fake, look) == expected
    room //= 2  # of which half is for larger steps
    assert used[0] == 0, "the first step shows the peak without them"
    assert max(used) <= room
    assert min(used[1:]) > room - 2048 - 128, "all of the room but what no bucket fits into"


def counted(fake: Fake, lengths: list[float], room: float) -> list[int]:
    """Bytes of blocks per step, on a device whose memory ends ``room`` above what is always there: it is never full.
    ``lengths``: of each step, what forward leaves; in units of all gradients, as ``room`` is."""
    model = deep_model(torch.bfloat16)
    used: list[int] = []
    with on_fake_device(fake) as links:
        unit = count_gradients(model, links)
        with AdamW(model.parameters(), speculation="always", threads=1, bucket_numel=1024) as optimizer:
            device = links[0].fake_device
            memory = device.memory
            memory.prompt = True
            device.capacity = 1 << 40
            device.capacity = memory.active + int(room * unit)
            for seed, length in enumerate(lengths):
                optimizer.zero_grad()
                memory.take(int(length * unit))
                batch(model, seed).backward()
                memory.give(int(length * unit))
                used.append(blocks_of(optimizer))
                optimizer.step()
                fake.synchronize()
                assert memory.peak <= device.capacity, f"step {seed}"
    return used


def test_steps_that_become_larger_find_memory(fake: Fake) -> None:
    plenty = counted(fake, [2] * 3, room=9)
    assert plenty[0] == 0 and plenty[1] == plenty[2] > 0
    used = counted(fake, [2, 2, 3, 3.9, 3.9, 2], room=4.6)
    assert plenty[1] == used[1] >= used[2] >= used[3] > used[4] == used[5] > 0


def test_gradients_that_come_again_show_no_peak(fake: Fake) -> None:
    """The last layer is run twice, so that its gradient is taken back when it is the only one so far."""
    model = deep_model(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    last: Any = list(model.parameters())[-2]
    list(model.parameters())[-1].requires_grad_(False)
    with on_fake_device(fake), AdamW(model.parameters(), speculation="always", bucket_numel=128) as optimizer:
        for seed in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                batch(model, seed).backward(inputs=[last])
            assert blocks_of(optimizer) == 0
            batch(model, seed).backward()
            assert (blocks_of(optimizer) > 0) == (seed > 0)
            optimizer.step()


@needs_grad_dtype
def test_passes_whose_sums_are_made_on_the_host_have_none(fake: Fake) -> None:
    """The forwards behind them need the memory. What the last pass gives is added, and packed no more."""
    with training(fake, model=deep_model(torch.bfloat16), accumulate_dtype="fp32") as (model, optimizer):
        link: Any = optimizer._engine.link
        for number in range(3):
            optimizer.zero_grad()
            with mock.patch.object(link, "has_room", return_value=False), optimizer.accumulate():
                batch(model, number).backward()
            assert optimizer._engine.is_filling and blocks_of(optimizer) == 0
            batch(model, 7 + number).backward()
            optimizer.step()
        assert early_buckets(optimizer._engine.buckets)


def test_memory_that_is_refused_is_done_without(fake: Fake, expected: dict[str, str]) -> None:
    used: list[int] = []
    allocations = 0

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        device: Any = link.fake_device
        if seed == 1:
            real: Callable[[int], Tensor] = device.empty

            def empty(nbytes: int) -> Tensor:
                nonlocal allocations
                allocations += 1
                if allocations == 4:
                    raise out_of_memory()
                return real(nbytes)

            device.empty = empty  # a full device
        used.append(blocks_of(optimizer))

    fake.delays(2, LATE)
    assert digests_with(fake, look) == expected
    assert allocations == 4, "asked no more"
    assert used[1] > used[2] > 0 and not any(used[3:])


def test_an_error_that_is_not_about_memory_is_told(fake: Fake) -> None:
    with training(fake, model=deep_model(torch.bfloat16)) as (model, optimizer):
        link: Any = optimizer._engine.link
        optimizer.zero_grad()
        with (
            mock.patch.object(link.fake_device, "empty", side_effect=RuntimeError("CUDA error: launch failed")),
            pytest.raises(RuntimeError, match=r"packing .*launch failed"),
        ):
            batch(model, 2).backward()


@pytest.mark.parametrize("setting", ["keep_grads", "unasked"])
def test_where_gradients_leave_nothing(fake: Fake, expected: dict[str, str], setting: str) -> None:
    used: list[int] = []

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        link.fake_device.reusing = setting == "unasked"
        used.append(blocks_of(optimizer))

    assert digests_with(fake, look, keep_grads=True if setting == "keep_grads" else None) == expected
    assert not any(used)
