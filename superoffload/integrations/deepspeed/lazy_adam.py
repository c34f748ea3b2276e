"""Makes DeepSpeedCPUAdam compile its kernel at its first call, since our engine never calls it.

DeepSpeed compiles the kernel when the optimizer is made. That fails without a compiler, and gives illegal instructions
where machines share a build.
"""

from __future__ import annotations

from typing import Any


def lazy_builder(builder: Any) -> Any:
    """Makes a replacement for ``CPUAdamBuilder``, where DeepSpeedCPUAdam looks it up."""

    class LazyCPUAdamBuilder(builder):
        """Loads a kernel that is built on its first use."""

        def load(self, *args: Any, **kwargs: Any) -> Any:
            build = super().load
            return _LazyKernel(lambda: build(*args, **kwargs))

    return LazyCPUAdamBuilder


class _LazyKernel:
    def __init__(self, build: Any) -> None:
        self._build = build
        self._kernel: Any = None
        self._created: dict[int, tuple[Any, ...]] = {}

    def create_adam(self, key: int, *arguments: Any) -> None:
        """Remembers the call until the kernel is built."""
        if self._kernel is None:
            self._created[key] = arguments
        else:
            self._kernel.create_adam(key, *arguments)

    def destroy_adam(self, key: int) -> None:
        """Forgets a call that was only remembered."""
        if self._kernel is None:
            self._created.pop(key, None)
        else:
            self._kernel.destroy_adam(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._kernel is None:
            self._kernel = self._build()
            for key, arguments in self._created.items():
                self._kernel.create_adam(key, *arguments)
            self._created.clear()
        return getattr(self._kernel, name)
