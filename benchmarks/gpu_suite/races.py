"""Checks that seeded random delays on every stream change no bit of the losses, the state, the parameters.

The reference is a synchronous run without delays. A delay keeps a stream busy before and after each of its uses by the
link, and the model's own stream before each module's forward and after its backward; so copies, steps and reads happen
in orders that an undisturbed run never shows. On a CPU the thread sleeps in the same places.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.training.config import ModelConfig
from benchmarks.training.model import Transformer
from superoffload import AdamW

_MODEL = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, mlp=128, sequence=32)
_LINK_CALLS = ("pack", "deliver", "make_visible")
_STEPS = 8


def run_races(
    device: str, speculation: str, delivery: str, seeds: Sequence[int], ranks: int = 1, steps: int = _STEPS
) -> dict[str, Any]:
    """Returns which seeds gave other bits than the reference, and all runs' ``fingerprints``, to compare over rows."""
    arguments = device, speculation, delivery, list(seeds), steps
    if ranks > 1:  # which share the device over gloo, with DistributedDataParallel; their fingerprints are joined
        from tests.convergence.local_ranks import LocalRanks

        with LocalRanks(ranks) as group:
            found = group.run(_runs, *arguments)
        fingerprints = ["".join(one) for one in zip(*found, strict=True)]
    else:
        fingerprints = _runs(*arguments)
    different = [seed for seed, one in zip(seeds, fingerprints[1:], strict=True) if one != fingerprints[0]]
    return {
        "seeds": list(seeds),
        "different_seeds": different,
        "fingerprint": fingerprints[0],
        "sanitizer": os.environ.get("TORCH_CUDA_SANITIZER") == "1",
        "ranks": ranks,
    }


def _runs(device_name: str, speculation: str, delivery: str, seeds: Sequence[int], steps: int) -> list[str]:
    """Runs the reference, then one run per seed."""
    device = open_device(device_name)
    with deterministic(), device.links():
        reference = _train(device, "never", "eager", None, steps)
        return [reference, *(_train(device, speculation, delivery, seed, steps) for seed in seeds)]


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes gradients independent of the order in which the device happens to work."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _train(device: Device, speculation: str, delivery: str, seed: int | None, steps: int) -> str:
    """Returns the SHA-256 of losses, norms, state and parameters of a run with clips, a NaN and accumulation."""
    torch.manual_seed(0)
    with device.torch:
        model = Transformer(_MODEL, torch.bfloat16 if device.kind == "cuda" else torch.float32)
    for param in model.parameters():
        param.data = param.data.bfloat16()
    options: dict[str, Any] = {"delivery": delivery}
    if delivery == "on_demand":
        options["module"] = model
    reduced = DistributedDataParallel(model, bucket_cap_mb=0.1) if _ranks() > 1 else None
    if reduced is not None:
        options["model"] = reduced
    optimizer = AdamW(
        model.parameters(), lr=1e-3, max_grad_norm=1.0, speculation=speculation, bucket_numel=4096, threads=2,
        **options,
    )  # fmt: skip
    digest = hashlib.sha256()
    try:
        device.prepare(model)
        delays = Delays(device, seed, model, optimizer)
        for step in range(steps):
            for value in _step(model, reduced, optimizer, device, step):
                digest.update(repr(value).encode())
        delays.remove()
        optimizer.synchronize()
        device.catch_up()
        digest.update(repr(sorted(optimizer.state_digests().items())).encode())
        for param in model.parameters():
            digest.update(param.detach().cpu().view(torch.int16).numpy().tobytes())
    finally:
        optimizer.close()
    return digest.hexdigest()


def _step(model: Transformer, reduced: Any, optimizer: Any, device: Device, step: int) -> list[float]:
    """Returns the step's loss and norm. Step 3 has a NaN, step 5 two micro-batches, every second one clips.

    ``reduced``: the DistributedDataParallel that averages gradients over several ranks.
    """
    rank = dist.get_rank() if reduced is not None else 0
    generator = torch.Generator().manual_seed(100 * step + rank)
    optimizer.max_grad_norm = 1e-2 if step % 2 else 1e6

    def backward() -> Tensor:
        tokens = torch.randint(0, _MODEL.vocabulary, (2, _MODEL.sequence + 1), generator=generator).to(device.torch)
        logits = (reduced or model)(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss * (math.nan if step == 3 else 1.0)).backward()
        return loss.detach()

    if step == 5:
        with optimizer.accumulate(), reduced.no_sync() if reduced is not None else nullcontext():
            backward()
    loss = backward()
    optimizer.step()
    norm = optimizer.grad_norm
    optimizer.zero_grad()
    return [float(loss), norm]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Delays:
    """Keeps streams busy at random, seeded, wherever the link or a module does something.

    Without a seed it delays nothing but has its hooks, with which autograd adds gradients in another order.
    """

    def __init__(self, device: Device, seed: int | None, model: Transformer, optimizer: Any) -> None:
        self._device, self._random = device, random.Random(seed)
        self._chance = 1 / 3 if seed is not None else 0.0  # so that most orders can come about
        self._link = optimizer._engine.link
        self._streams = [None, *device.streams_of(self._link)]  # None: the current one
        self._undo: list[Callable[[], None]] = []
        for module in model.blocks:
            self._undo += [
                module.register_forward_pre_hook(lambda *_: self._here()).remove,
                module.register_full_backward_hook(lambda *_: self._here()).remove,
            ]
        for name in _LINK_CALLS:
            if hasattr(self._link, name):
                self._wrap(name)

    def _wrap(self, name: str) -> None:
        call = getattr(self._link, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            self._everywhere()
            result = call(*args, **kwargs)
            self._everywhere()
            return result

        setattr(self._link, name, delayed)
        self._undo.append(lambda: delattr(self._link, name))

    def _here(self) -> None:
        if self._random.random() < self._chance:
            self._device.delay(self._random)

    def _everywhere(self) -> None:
        for stream in self._streams:
            if self._random.random() < self._chance:
                self._device.delay(self._random, stream)

    def remove(self) -> None:
        for undo in self._undo:
            undo()
