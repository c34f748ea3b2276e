"""What an allocator counts, for the stand-in for a device (tests/support/fake_cuda.py)."""

from __future__ import annotations

from torch import Tensor


class Memory:
    """What an allocator counts: bytes that are in use, in its units, and the most of them at a time."""

    def __init__(self) -> None:
        self.active = 0
        self.peak = 0
        self.prompt = False  # what was released to another stream is free at once, and not at the end of the step
        self._late: list[int] = []
        self._gradients: dict[int, list[int]] = {}  # address -> bytes that are needed, bytes in all

    def take(self, nbytes: int) -> None:
        self.active += allocated(nbytes)
        self.peak = max(self.peak, self.active)

    def give(self, nbytes: int) -> None:
        self.active -= allocated(nbytes)

    def take_gradient(self, gradient: Tensor) -> None:
        """What is added to one that is there already takes nothing."""
        if gradient.data_ptr() in self._gradients:
            return
        nbytes = gradient.numel() * gradient.element_size()
        self._gradients[gradient.data_ptr()] = [nbytes, nbytes]
        self.take(nbytes)

    def free_of_gradient(self, gradient: int, nbytes: int, *, later: bool) -> None:
        """A part of it; the last one frees the whole. ``later``: at a time that the program does not know."""
        left = self._gradients.get(gradient)
        if left is None:
            return
        left[0] -= nbytes
        if left[0] == 0:
            del self._gradients[gradient]
            if later and not self.prompt:
                self._late.append(left[1])
            else:
                self.give(left[1])

    def step_ended(self) -> None:
        for nbytes in self._late:
            self.give(nbytes)
        self._late.clear()


def allocated(nbytes: int) -> int:
    """What torch's allocator makes of it."""
    return -(-nbytes // 512) * 512
