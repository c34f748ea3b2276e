"""DeepSpeed's own SuperOffload on processors, to record what it does: CUDA check and stream synchronization stubbed.

Its worker is the original function on a thread instead of a process, which changes nothing in what it computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Stream:
    def synchronize(self) -> None:
        """Copies on processors have ended when they return."""


class _Accelerator:
    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def current_stream(self) -> _Stream:
        return _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _on_a_thread(original: type, worker: Any) -> type:
    class ThreadOptimizer(original):
        def __init__(self, optimizer_config: Any, max_grad_numel: int, **_: Any) -> None:
            self.max_grad_numel = max_grad_numel
            self.param_queue, self.result_queue = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
            arguments = (self.param_queue, self.result_queue, optimizer_config, max_grad_numel, False)
            self.cpuadam_process = threading.Thread(target=worker, args=arguments, daemon=True)
            self.cpuadam_process.start()
            self.submitted = 0

        def async_step(self, *args: Any, **kwargs: Any) -> None:
            self.submitted += 1
            super().async_step(*args, **kwargs)

        def close(self) -> None:
            self.param_queue.put(None)
            self.cpuadam_process.join(20)

    return ThreadOptimizer


@contextmanager
def stubs() -> Iterator[None]:
    """Its CUDA check and stream synchronization replaced, its worker on a thread."""
    from deepspeed.runtime.superoffload import superoffload_stage3 as upstream
    from deepspeed.runtime.superoffload import superoffload_utils as utils

    saved = {name: getattr(upstream, name) for name in ("SuperOffloadCPUOptimizer", "get_accelerator")}
    check = upstream._validate_superoffload_accelerator
    upstream._validate_superoffload_accelerator = lambda: None
    upstream.get_accelerator = lambda: _Accelerator(saved["get_accelerator"]())
    upstream.SuperOffloadCPUOptimizer = _on_a_thread(
        utils.SuperOffloadCPUOptimizer, utils.superoffload_optimizer_worker
    )
    try:
        yield
    finally:
        upstream._validate_superoffload_accelerator = check
        for name, value in saved.items():
            setattr(upstream, name, value)


@contextmanager
def engine(configuration: dict[str, Any], model: Any, optimizer: Any = None) -> Iterator[Any]:
    """An engine with upstream's optimizer, while ours is disabled; ended with the context."""
    import deepspeed

    import superoffload.integrations.deepspeed as ours

    ours.disable()
    configuration.pop("superoffload", None)
    arguments = {"model_parameters": model.parameters()} if optimizer is None else {"optimizer": optimizer}
    with stubs():
        made, *_ = deepspeed.initialize(model=model, config=configuration, **arguments)
        try:
            yield made
        finally:
            made.optimizer.superoffload_cpu_optimizer.close()
            made.destroy()
            made._config.zero_config.offload_optimizer.super_offload = False  # enable() would refuse to meet it again
