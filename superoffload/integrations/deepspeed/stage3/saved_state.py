"""Who reads and writes masters and moments: they settle first. Checkpoints among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from superoffload.integrations.deepspeed.stage3.steps import Steps
from superoffload.interrupts import held_signals


class SavedState(Steps):
    """State as after the last finished step, whoever asks."""

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self._await_gradients()
        with held_signals():
            self._opened().core.quiesce()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        self.synchronize()
        yield

    def _get_fp32_opt_state_partition(self, param: Any, *args: Any, **kwargs: Any) -> Any:
        self._await_gradients()
        self._look()
        self._opened().settle(param.ds_id)
        return super()._get_fp32_opt_state_partition(param, *args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        with self._settled():
            super()._restore_from_bit16_weights()

    def checkpoint_event_prologue(self) -> None:
        with self._settled():
            super().checkpoint_event_prologue()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are in host memory as they are; what moves is fresh."""
        with self._settled():
            super().offload_states(*args, **kwargs)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's layout, as after the last finished step, also between backward and ``step()``."""
        with self._settled():
            state: dict[str, Any] = super().state_dict()
            return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Ours and stock ZeRO-3's, also universal ones. A window in flight is abandoned."""
        self.zero_grad()
        with self._settled():
            mine = [dict(self.optimizer.state[flat]) for flat in self.fp32_partitioned_groups_flat]
            super().load_state_dict(*args, **kwargs)
            self._take_loaded_state(mine)

    def _take_loaded_state(self, mine: list[dict[str, Any]]) -> None:
        """DeepSpeed replaces moment tensors; the shards point into ours, so the values move there."""
        steps = []
        for flat, own in zip(self.fp32_partitioned_groups_flat, mine, strict=True):
            loaded = self.optimizer.state[flat]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in loaded:  # a stock checkpoint of before the first step has no state
                    own[name].zero_()
                elif loaded[name] is not own[name]:
                    own[name].copy_(loaded[name])
                loaded[name] = own[name]
            steps.append(int(loaded.get("step", 0)))
        self._opened().set_steps(steps)
        self._show_steps()
        if self._session is not None:
            self._session.loaded(max(steps))
            self._look_is_due = False

    def state_digests(self) -> dict[str, str]:
        """SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        self.synchronize()
        return self._opened().core.digests()
