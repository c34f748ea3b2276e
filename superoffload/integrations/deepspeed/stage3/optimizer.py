"""``SpeculativeStage3``: its construction, who gathers its parameters, its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

from superoffload.closing import close_at_exit, is_closed
from superoffload.environment import check_environment
from superoffload.errors import StateError
from superoffload.integrations.deepspeed.config import load, read_options
from superoffload.integrations.deepspeed.delivery import Readers
from superoffload.integrations.deepspeed.features import check_arguments, check_groups_alike, check_optimizer
from superoffload.integrations.deepspeed.stage3.saved_state import SavedState


class SpeculativeStage3(SavedState):
    """ZeRO-3 whose optimizer steps during backward, on the CPU, with a result that speculation never changes."""

    _readers: Readers | None = None

    def __init__(
        self, module: Any, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, **kwargs: Any
    ) -> None:
        check_environment()
        config = load(ds_config) or {}
        self.superoffload_options = read_options(config)
        check_optimizer(init_optimizer, DeepSpeedCPUAdam)
        self._on_cpu = bool(get_accelerator().is_synchronized_device())
        check_arguments(kwargs)
        self._boundary_is_told = bool(config.get("managed_gradient_accumulation", True))
        self._arriving = deque()
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **kwargs)
        if self.torch_autocast_gradscaler is not None:
            raise StateError("torch_autocast with fp16: its loss scaler is not supported; use bf16, or fp16 without it")
        check_groups_alike(self._trained(), self.dp_process_group)
        self._driver = self._make_driver()
        self._session = self._open_session(self._driver)
        self._readers = Readers(
            self.module.parameters(),
            before_gather=self._before_gather if self._delivers_later else None,
            after_update=self._after_update,
        )
        close_at_exit(self)
        for param in self._trained():
            param.superoffload_steps_it = True  # clipping.py asks

    # ---- who gathers parameters -----------------------------------------------------------------------------------

    def _before_gather(self, params: list[Any]) -> None:
        if self._driver is not None:
            with self._for_the_next_step():
                self._driver.deliver([param.ds_id for param in params])

    def _after_update(self, params: list[Any]) -> None:
        """``GatheredParameters(..., modifier_rank=...)`` wrote parameters: the masters follow."""
        if self._driver is not None:
            self._look_is_due = False
            for param in params:
                self._driver.take_over(param.ds_id)

    # ---- figures and the end --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Totals of this rank since construction (superoffload/stats.py)."""
        return self._opened().core.stats()

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads; parameters and state stay readable."""
        driver, self._driver = self._driver, None
        if self._readers is not None:
            self._readers.close()
            self._readers = None
        self._arriving.clear()
        self._session, self._look_is_due = None, False
        is_closed(self)
        if driver is not None:
            driver.close()

    def __iter__(self) -> Iterator[Any]:
        """What torch.distributed.checkpoint tries with something that is no torch.optim.Optimizer."""
        raise StateError("DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; use engine.save_checkpoint()")

    def destroy(self) -> None:
        """As DeepSpeed's, and ends what is ours.

        DeepSpeed's hooks keep the optimizer of a destroyed engine alive, so its state and gradients are let go of
        here: they are most of the host memory, pinned where ``pin_memory`` says so. Parameters stay readable.
        """
        self.close()
        super().destroy()
        self.optimizer.state.clear()
        self.fp32_partitioned_groups_flat.clear()
        self.grad_partitions_flat_buffer = None
        getattr(self, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}).clear()

    def __del__(self) -> None:
        if self._driver is not None:  # let go of without destroy(): nobody can read what was speculated any more
            self._driver.core.pool.close()
