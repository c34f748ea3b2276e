"""Holds the scalars with which the accelerator steps a resident bucket; worker threads have no work on it."""

from __future__ import annotations

from collections.abc import Sequence

from superoffload import _native


class ResidentWork:
    """Holds the kernels' scalars of every piece of a resident bucket, None where it has no gradient.

    ``noise_streams``: of its pieces.
    """

    def __init__(self, noise_streams: Sequence[int]) -> None:
        self._streams = noise_streams
        self.scalars: list[bytes | None] = [None] * len(noise_streams)

    def freeze(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        gradient_factor: float,
        l2: bool,
        steps: list[int],
    ) -> None:
        """Does what ``BucketWork.freeze`` does; a step number of 0 means that the piece is not stepped."""
        self.scalars = [
            _native.freeze_scalars(lr, beta1, beta2, eps, weight_decay, gradient_factor, l2, step, stream)
            if step
            else None
            for step, stream in zip(steps, self._streams, strict=True)
        ]
