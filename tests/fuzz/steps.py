"""Operations that step."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz.program import Op
from tests.fuzz.signals import signals_of
from tests.fuzz.world import World


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
    stats = world.optimizer.stats()
    return int(stats["steps"] + stats["skipped_steps"])
