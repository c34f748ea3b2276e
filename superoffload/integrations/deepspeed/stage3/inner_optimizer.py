"""Wraps the optimizer that the user or the config names: reads its settings, shows the engine's state in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from superoffload.engine.bucket import GroupHyper
from superoffload.errors import StateError
from superoffload.integrations.deepspeed.features import hyper_of
from superoffload.integrations.deepspeed.stage3.stock import StockStage3
from superoffload.integrations.deepspeed.stage3.sub_group_state import MOMENTS, SubGroupState


class InnerOptimizer:
    """Shows step counts and moments where DeepSpeed looks for them: in the state of torch's optimizer."""

    def __init__(self, stock: StockStage3, states: Sequence[SubGroupState]) -> None:
        """Takes ``states``, one per sub-group."""
        self._stock = stock
        self._states = states
        self._show([0] * len(states))

    def _entries(self) -> Iterator[tuple[Tensor, SubGroupState]]:
        """Yields the keys of torch's state, and what they stand for."""
        return zip(self._stock.fp32_partitioned_groups_flat, self._states, strict=True)

    def _show(self, steps: Sequence[int]) -> None:
        for (flat, state), done in zip(self._entries(), steps, strict=True):
            self._stock.optimizer.state[flat] = state.shown(self._step_value(done))

    # ---- settings -------------------------------------------------------------------------------------------------

    def hyper(self, group: int) -> GroupHyper:
        """Reads a param group's present hyper-parameters."""
        return hyper_of(self._stock.optimizer, group)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that must be the same on all ranks."""
        found: dict[str, Any] = {}
        for index in range(len(self._stock.optimizer.param_groups)):
            for name, value in asdict(self.hyper(index)).items():
                found[f"{name} of group {index}"] = value
        clip, scale = float(self._stock.clip_grad), float(self._stock.loss_scale)
        return {**found, "gradient_clipping": clip, "loss scale": scale}

    # ---- steps ----------------------------------------------------------------------------------------------------

    def refuse_hooks(self) -> None:
        """Refuses hooks around ``step()``, which is never called."""
        inner = self._stock.optimizer
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            raise StateError("step hooks are not called under DeepSpeed; do around engine.step() what they do")

    def show_steps(self, steps: Sequence[int]) -> None:
        """Writes ``steps``, one number per sub-group, into the state."""
        for flat, done in zip(self._stock.fp32_partitioned_groups_flat, steps, strict=True):
            self._stock.optimizer.state[flat]["step"] = self._step_value(done)

    def stepped(self) -> None:
        """Marks the optimizer as stepped: torch's schedulers warn if ``step()`` was not called, and it never is."""
        self._stock.optimizer._opt_called = True

    def _step_value(self, steps: int) -> Any:
        """Converts a step count: DeepSpeedCPUAdam counts in an int, torch in a tensor."""
        return (
            steps if isinstance(self._stock.optimizer, DeepSpeedCPUAdam) else torch.tensor(float(steps), device="cpu")
        )

    # ---- loads ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[list[int]]:
        """Takes over what DeepSpeed loads meanwhile; the list that it yields then has each sub-group's steps.

        DeepSpeed replaces moments, or whole entries. What it leaves alone keeps its value. If it raises, or if a value
        cannot be taken over, the moments are those from before.
        """
        before = [self._put_placeholders(flat, state) for flat, state in self._entries()]
        steps: list[int] = []
        try:
            yield steps
            loaded = [self._stock.optimizer.state[flat] for flat, _ in self._entries()]
            for (_, state), entry, placeholders in zip(self._entries(), loaded, before, strict=True):
                for name in _replaced(entry, placeholders):
                    state.check(name, entry[name])
            for (_, state), entry, placeholders in zip(self._entries(), loaded, before, strict=True):
                _take(state, entry, placeholders)
            steps += [int(entry.get("step", 0)) for entry in loaded]
        finally:
            self._show(steps or [int(placeholders["step"]) for placeholders in before])

    def _put_placeholders(self, flat: Tensor, state: SubGroupState) -> dict[str, Any]:
        """Puts a plain dictionary where copies are shown, which take no values; returns what is there now."""
        entry = self._stock.optimizer.state[flat]
        plain = {"step": entry["step"], **{name: state.placeholder(name) for name in MOMENTS}}
        self._stock.optimizer.state[flat] = plain
        return dict(plain)


def _replaced(entry: Mapping[str, Any], placeholders: Mapping[str, Any]) -> list[str]:
    return [name for name in MOMENTS if name in entry and entry[name] is not placeholders[name]]


def _take(state: SubGroupState, entry: Mapping[str, Any], placeholders: Mapping[str, Any]) -> None:
    for name in MOMENTS:
        if name not in entry:  # a stock checkpoint from before the first step has no state
            state.clear(name)
    for name in _replaced(entry, placeholders):
        state.write(name, entry[name])
