"""Memory of the device: blocks for parameters on their way up, freed gradients that graphs write again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.host.memory import is_out_of_memory
from superoffload.links.cuda.device import TorchDevice
from superoffload.optimizer.master_updates import MasterUpdates
from tests.support.adamw_training import batch, grads_of, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import LATE, blocks_of, count_gradients, deep_model, out_of_memory, run, training

Outcome = tuple[dict[str, str], int]


def test_blocks_and_gradients_never_exceed_all_gradients(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as an allocator does, whenever a gradient or a block appears; staging that is always there aside. What
    record_stream was called for counts until the end of the step."""
    monkeypatch.setattr(MasterUpdates, "compares_on_device", False)  # no more sums of bits
    model = deep_model(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    with on_fake_device(fake) as links:
        all_gradients = count_gradients(model, links)
        with AdamW(model.parameters(), speculation="always", threads=1, bucket_numel=1024) as optimizer:
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
            assert most > all_gradients / 2, "most of the gradients' memory is used again"


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
        came, expected = [], [grad.view(-1) for grad in grads_of(gradients)]
        for bucket in buckets:
            bucket.arrival.wait()
            for piece in bucket.pieces:
                packed = bucket.gradient[piece.offset : piece.offset + piece.numel]
                came.append(torch.equal(packed, expected[piece.shard.index][piece.start : piece.start + piece.numel]))
        assert len(came) > 10 and all(came) == waits


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


def test_memory_that_is_refused_is_done_without(fake: Fake) -> None:
    used: list[int] = []
    allocations = 0

    def program(model: nn.Module, optimizer: AdamW) -> None:
        device: Any = getattr(optimizer._engine.link, "fake_device", None)
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            if device is not None:
                used.append(blocks_of(optimizer))
                if seed == 1:
                    device.empty = partial(empty, device.empty)  # a full device
            optimizer.step()

    def empty(real: Callable[[int], Tensor], nbytes: int) -> Tensor:
        nonlocal allocations
        allocations += 1
        if allocations == 4:
            raise out_of_memory()
        return real(nbytes)

    fake.delays(2, LATE)
    assert run(program, make=deep_model, fake=fake).digests == run(program, make=deep_model).digests
    assert fake.mismatches == 0 and allocations == 4, "asked no more"
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


# ---- memory that CUDA graphs write again, and what torch says of memory ----------------------------------------------


GRAPH_TREES = "torch._inductor.cudagraph_trees"


def replayed(fake: Fake, seed: int, *, waits: bool = True) -> dict[str, str]:
    """Each gradient's memory is written again on the current stream as soon as it was packed."""

    def program(model: nn.Module, optimizer: AdamW) -> None:
        link: Any = optimizer._engine.link
        link.fake_device.reusing = True
        if not waits:
            fake.drop_waits(link.roles["current"], link.roles["pack"])
        fake.delays(seed, LATE)
        train(model, optimizer, range(4))
        fake.synchronize()
        assert link.fake_device.ahead == [link.roles["pack"]], "the pack stream goes ahead of backward"
        assert not link.fake_device.released, "record_stream would keep the graphs' pool from its checkpoints"

    return run(program, make=deep_model, fake=fake).digests


def test_gradients_that_graphs_write_again_are_read_first(fake: Fake) -> None:
    expected = run(partial(train, seeds=range(4)), make=deep_model).digests
    assert all(replayed(fake, seed) == expected for seed in range(2))
    assert any(replayed(fake, seed, waits=False) != expected for seed in range(6))


# ---- what torch is asked --------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TorchDevice:
    """TorchDevice without a GPU; tests say what torch answers."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.delitem(sys.modules, GRAPH_TREES, raising=False)
    return TorchDevice(torch.device("cuda", 1))


def test_graph_trees_of_the_device_write_gradients_again(device: TorchDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not device.reuses_unasked(), "nothing was compiled"
    managers: dict[int, object] = {0: object()}

    def get_manager(ordinal: int, create_if_none_exists: bool) -> object | None:
        assert not create_if_none_exists
        return managers.get(ordinal)

    monkeypatch.setitem(sys.modules, GRAPH_TREES, SimpleNamespace(get_manager=get_manager))
    assert not device.reuses_unasked(), "those of another device"
    managers[1] = object()
    assert device.reuses_unasked()
    monkeypatch.setitem(sys.modules, GRAPH_TREES, SimpleNamespace())
    assert device.reuses_unasked(), "a version whose trees we cannot ask"
    asserting = mock.Mock(side_effect=AssertionError)
    monkeypatch.setitem(sys.modules, GRAPH_TREES, SimpleNamespace(get_manager=asserting))
    assert not device.reuses_unasked(), "torch's own answer in a thread without trees, before 2.13"
    from torch._inductor import cudagraph_trees

    monkeypatch.setitem(sys.modules, GRAPH_TREES, cudagraph_trees)
    assert not device.reuses_unasked(), "this torch still answers"
    for backend, unasked in (("cudaMallocAsync", False), ("pluggable", True)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert TorchDevice(torch.device("cuda", 0)).reuses_unasked() is unasked, backend


def test_out_of_memory_is_told_in_several_ways() -> None:
    assert is_out_of_memory(out_of_memory())
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    later: Any = getattr(torch, "AcceleratorError", None)  # since torch 2.8 what a later call of the runtime raises
    if later is not None:
        assert is_out_of_memory(later("CUDA error: out of memory\nCompile with ..."))
        assert not is_out_of_memory(later("CUDA error: an illegal memory access was encountered"))
