"""While an optimizer sleeps, the state of its shards may be in a file, and the memory serves others."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.placement import slab_of_zeros
from superoffload.errors import ArgumentError, LostState, StateError

_RUN = 16 << 20  # bytes that one thread writes or reads at a time
_THREADS = 4  # a checksum takes longer than a fast disk


class StateFile:
    """Keeps state in a file without a name: the system removes it with the process, however that ends."""

    def __init__(self, folder: str | os.PathLike[str], shards: Sequence[Shard]) -> None:
        """Makes an empty file; raises ArgumentError where ``folder`` cannot take the state of ``shards``."""
        try:
            if not os.fspath(folder):
                raise ValueError("an empty path")  # of a variable that is not set; Path takes it for this folder
            self.folder = Path(folder)
            free = shutil.disk_usage(self.folder).free
            self._file = TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - closed by close()
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"folder={folder!r}: expected the path of a folder on a disk, or None") from error
        except OSError as error:
            raise ArgumentError(f"folder={str(folder)!r}: {error.strerror}; expected a folder to write to") from error
        needed = sum(shard.state_bytes for shard in shards)
        if needed > free:
            self.close()
            raise ArgumentError(
                f"folder={str(folder)!r}: {free / 1e9:.3g} GB are free there, and masters and moments have "
                f"{needed / 1e9:.3g} GB; choose another disk, or call sleep() without a folder"
            )
        self._shards: list[Shard] = []
        self._apart: list[bool] = []  # of the shards: memory of its own
        self._forms: list[tuple[torch.dtype, int]] = []  # of the tensors: dtype, elements
        self._sums: list[int] = []  # CRC-32 of each run

    def take(self, shards: Sequence[Shard], apart: Sequence[Shard] = ()) -> None:
        """Writes state in host memory, and lets go of that memory. Where it raises OSError, nothing has changed.

        ``apart``: shards whose memory is of use only until their state moves on.
        """
        tensors = list(chain.from_iterable(shard.state_tensors() for shard in shards))
        self._sums = self._each_run(_write, tensors)
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):  # the system keeps what was written, in memory
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._shards, self._forms = list(shards), [(tensor.dtype, tensor.numel()) for tensor in tensors]
        alone = set(map(id, apart))
        self._apart = [id(shard) in alone for shard in shards]
        self._hand_out([torch.empty(0, dtype=dtype, device="cpu") for dtype, _ in self._forms])

    def give_back(self) -> None:
        """Reads the state into new memory. Where it raises, nothing has changed."""
        tensors = self._room()
        try:
            sums = self._each_run(_read, tensors)
        except OSError as error:
            raise StateError(f"masters and moments in {self.folder} cannot be read: {error.strerror}") from error
        if sums != self._sums:
            raise LostState(
                f"masters and moments in {self.folder} are not what sleep() wrote there: the disk is damaged; make a "
                "new optimizer and load the last checkpoint"
            )
        self._hand_out(tensors)

    def close(self) -> None:
        """Gives up the file."""
        self._file.close()

    def _room(self) -> list[Tensor]:
        """Makes one slab for each of a shard's tensors and dtype; other ones for shards that are apart."""
        slabs: dict[tuple[int, torch.dtype, bool], list[int]] = defaultdict(list)
        per_shard = len(self._forms) // max(1, len(self._shards))
        for place, (dtype, _) in enumerate(self._forms):
            slabs[place % per_shard, dtype, self._apart[place // per_shard]].append(place)
        room: dict[int, Tensor] = {}
        for (_, dtype, _), places in slabs.items():
            sizes = [self._forms[place][1] for place in places]
            room.update(zip(places, slab_of_zeros(sizes, dtype, None), strict=True))
        return [room[place] for place in range(len(self._forms))]

    def _hand_out(self, tensors: Sequence[Tensor]) -> None:
        each = iter(tensors)
        for shard in self._shards:
            master, exp_avg, exp_avg_sq, upper = (next(each) for _ in range(4))
            shard.use_state(master, exp_avg, exp_avg_sq, resident=False)
            if shard.upper is not None:
                shard.upper.are_in(upper)

    def _each_run(self, work: Callable[[int, memoryview, int], int], tensors: Sequence[Tensor]) -> list[int]:
        """Has threads do ``work`` with the file, the bytes of each run and their place in it; returns the results."""
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                return list(threads.map(lambda run: work(self._file.fileno(), *run), _runs(tensors)))
        except (RuntimeError, MemoryError) as error:  # no threads, or no memory for them
            raise OSError(errno.EAGAIN, str(error) or "no memory") from error


def _runs(tensors: Sequence[Tensor]) -> Iterator[tuple[memoryview, int]]:
    at = 0
    for tensor in tensors:
        data: Any = tensor.view(torch.uint8).numpy()
        for first in range(0, len(data), _RUN):
            run = memoryview(data)[first : first + _RUN]
            yield run, at
            at += len(run)


def _write(file: int, run: memoryview, at: int) -> int:
    _wholly(partial(os.pwrite, file), run, at)
    return zlib.crc32(run)


def _read(file: int, run: memoryview, at: int) -> int:
    _wholly(lambda rest, place: os.preadv(file, [rest], place), run, at)
    return zlib.crc32(run)


def _wholly(move: Callable[[memoryview, int], int], run: memoryview, at: int) -> None:
    """Repeats ``move``, which may move fewer bytes than asked for, until all of ``run`` is moved."""
    while len(run):
        count = move(run, at)
        if not count:
            raise OSError(0, "the file ends too early")
        run, at = run[count:], at + count
