"""Other libraries' AdamW with moments in 8 or 4 bits: torchao's, which torch.compile compiles, and bitsandbytes'.

Both have dynamic codes and an fp32 scale per block, and round to nearest. Both leave parameters of less than 4,096
elements in fp32. Neither has masters: they step the parameters that they are given.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.adam.contestants import PeerMissing


@dataclass(frozen=True)
class EightBitPeer:
    """Names a library's class; ``bytes_per_param``: of its moments, scales included."""

    module: str
    class_name: str
    bytes_per_param: float

    def optimizer(self, params: Sequence[Any], **options: Any) -> Any:
        """Makes the optimizer; raises PeerMissing where the library cannot be used."""
        return self._load()(params, **options)

    def check(self) -> None:
        """Raises PeerMissing where the library cannot be used."""
        self._load()

    def _load(self) -> Callable[..., Any]:
        try:
            with _silent():  # both say at import what they lack for GPUs
                loaded: Callable[..., Any] = getattr(import_module(self.module), self.class_name)
        except ImportError as error:
            raise PeerMissing(f"{self.module.partition('.')[0]} cannot be imported: {error}") from None
        return loaded


PEERS = {
    "torchao 8bit": EightBitPeer("torchao.optim", "AdamW8bit", 2 * (1 + 4 / 256)),
    "torchao 4bit": EightBitPeer("torchao.optim", "AdamW4bit", 2 * (0.5 + 4 / 128)),
    "bitsandbytes 8bit": EightBitPeer("bitsandbytes.optim", "AdamW8bit", 2 * (1 + 4 / 256)),
}


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
