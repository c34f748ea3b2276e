"""Other libraries' optimizers: DeepSpeed's for the CPU, and AdamW with moments in 8 or 4 bits.

torchao's (which torch.compile compiles) and bitsandbytes' have dynamic codes and an fp32 scale per block, and round to
nearest. Both leave parameters of less than 4,096 elements in fp32. They have no masters: they step the parameters that
they are given.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from superoffload.errors import ArgumentError


class PeerMissing(ArgumentError):
    """Says why a peer cannot take part."""


@dataclass(frozen=True)
class Peer:
    """Names a library's class; ``bytes_per_param``: of its moments, scales included."""

    module: str
    class_name: str
    bytes_per_param: float

    def optimizer(self, params: Sequence[Any], **options: Any) -> Any:
        return self.check()(params, **options)

    def check(self) -> Any:
        """Returns the class; raises PeerMissing where the library cannot be used."""
        try:
            with _silent():  # both say at import what they lack for GPUs
                return getattr(import_module(self.module), self.class_name)
        except ImportError as error:
            raise PeerMissing(f"{self.module.partition('.')[0]} cannot be imported: {error}") from None


PEERS = {
    "torchao 8bit": Peer("torchao.optim", "AdamW8bit", 2 * (1 + 4 / 256)),
    "torchao 4bit": Peer("torchao.optim", "AdamW4bit", 2 * (0.5 + 4 / 128)),
    "bitsandbytes 8bit": Peer("bitsandbytes.optim", "AdamW8bit", 2 * (1 + 4 / 256)),
}


def load_deepspeed() -> Any:
    """Returns DeepSpeed's class with its kernel built (it compiles at first use); raises PeerMissing."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        raise PeerMissing("not installed") from None
    try:
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever its build system raises
        raise PeerMissing(f"installed, but its kernel cannot be used: {' '.join(str(error).split())[:200]}") from error
    return DeepSpeedCPUAdam


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
