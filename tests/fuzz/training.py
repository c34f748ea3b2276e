"""Operations that make gradients, and that step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from tests.fuzz.model import UserError
from tests.fuzz.program import Op
from tests.fuzz.signals import signals_of
from tests.fuzz.world import World

_THREADS = 3


def backward(world: World, op: Op) -> None:
    with world.optimizer.accumulate() if op.get("accumulate") else nullcontext():
        loss = world.loss(op)
        if not loss.requires_grad:
            return
        for name in ("accumulate", "twice", "keep", "poison"):
            if op.get(name):
                world.count(f"backward, {name}")
        _backward(world, loss, retain_graph=bool(op.get("twice") or op.get("keep")))
        if op.get("twice"):
            _backward(world, loss, retain_graph=bool(op.get("keep")))
    if op.get("keep"):
        world.kept = loss
    world.note_published()


def backward_again(world: World, op: Op) -> None:
    """Through a graph that was retained, perhaps over steps."""
    if world.kept is None:
        return
    try:
        _backward(world, world.kept, retain_graph=True)
        world.count("backward_again, something")
    except RuntimeError as error:  # torch's, where a parameter has changed since
        if "modified by an inplace operation" not in str(error):
            raise
        world.note("raised", "outdated graph")
        world.count("backward_again, outdated graph")


def _backward(world: World, loss: Tensor, *, retain_graph: bool) -> None:
    try:
        loss.backward(retain_graph=retain_graph)
    except (UserError, KeyboardInterrupt) as error:
        world.count(f"backward, {type(error).__name__}")
        world.note("raised", type(error).__name__)


def threads(world: World, op: Op) -> None:
    """Backward in several threads at once, each on its part of the layers; in the other run one after the other."""
    parts = [list(range(start, len(world.net.layers), _THREADS)) for start in range(_THREADS)]
    losses = [loss for part in parts if (loss := world.loss({**op, "raises": None}, part)).requires_grad]
    together = len(losses) if world.speculates else 1
    with ThreadPoolExecutor(together or 1) as pool, _switching_often():
        start = threading.Barrier(together or 1)

        def run(loss: Tensor) -> None:
            start.wait(60.0)
            loss.backward()

        for running in [pool.submit(run, loss) for loss in losses]:
            running.result()
    world.note_published()


@contextmanager
def _switching_often() -> Iterator[None]:
    """Between threads: so that races show in hooks this short."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def interrupted_backward(world: World, op: Op) -> None:
    """Whatever was interrupted, its user goes on with no gradients at all."""
    if world.written:  # else masters follow during backward, as far as that comes
        world.optimizer.refresh_masters()
    if world.speculates:
        loss = world.net(op)
        with signals_of(op) as interrupt:
            if loss.requires_grad:
                loss.backward()
        for name in interrupt.raised:
            world.count(f"interrupted_backward, {name}")
        if interrupt.sent > 1:
            world.count("second signal")
    world.optimizer.zero_grad()
    world.net.zero_grad()


def zero_grad(world: World, op: Op) -> None:
    world.optimizer.zero_grad(op["set_to_none"])


def forward(world: World, op: Op) -> None:
    world.loss(op)


# ---- steps ---------------------------------------------------------------------------------------------------------


def step(world: World, op: Op) -> None:
    graded = [param.grad for param in world.grouped() if param.grad is not None]
    if world.scaler is not None and graded and world.scaler._scale is not None:
        _scaled_step(world, world.scaler, graded, unscales=bool(op.get("unscale")))
    elif "closure" in op and world.scaler is None:
        _step_with_closure(world, op["closure"])
    else:
        _expect(world, 1.0)
        world.optimizer.step()
    if world.oracle is not None:
        world.oracle.after()
    world.written = False
    world.note_verdict()


def _expect(world: World, unscale: float) -> None:
    if world.oracle is not None:
        world.oracle.before(unscale)


def _step_with_closure(world: World, op: Op) -> None:
    def closure() -> float:
        world.optimizer.zero_grad()
        loss = world.loss(op)
        if loss.requires_grad:
            loss.backward()
        _expect(world, 1.0)
        return 0.0

    world.count("step, closure")
    world.optimizer.step(closure)


def _scaled_step(world: World, scaler: torch.amp.GradScaler, graded: list[Tensor], *, unscales: bool) -> None:
    unscale = 1.0 / scaler.get_scale()
    if unscales and all(grad.dtype is not torch.float16 for grad in graded):  # torch refuses those
        world.count("step, unscale_")
        scaler.unscale_(world.optimizer)
        unscale = 1.0
    world.count("step, GradScaler")
    _expect(world, unscale)
    scaler.step(world.optimizer)
    scaler.update()


def interrupted_step(world: World, op: Op) -> None:
    """It happened or it did not; then the other run does the same."""
    if world.scaler is not None:  # its user would have to mend it, too
        step(world, {"do": "step"})
        return
    if world.written:  # a step without gradients takes over what was written, too, and is not counted
        world.optimizer.refresh_masters()
    if world.restructured:
        world.optimizer.synchronize()
        world.restructured = False
    if not world.speculates:
        if world.stepped.pop(0):
            step(world, {"do": "step"})
        return
    before = _steps(world)
    with signals_of(op) as interrupt:
        world.optimizer.step()
    happened = _steps(world) > before or not interrupt.raised
    for name in interrupt.raised:
        world.count(f"interrupted_step, {name}")
        world.count(f"interrupted_step, {'happened' if happened else 'did not happen'}")
    if interrupt.sent > 1:
        world.count("second signal")
    world.seen.stepped.append(happened)
    if happened:
        world.written = False
        world.note_verdict()


def _steps(world: World) -> int:
    return sum(int(world.optimizer.stats()[name]) for name in ("steps", "skipped_steps"))
