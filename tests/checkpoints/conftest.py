"""What tests of checkpoints begin with: a checkpoint of two steps, a run that loads, a model that reads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import model_of
from tests.support.saved_runs import Run, save_two_steps


def temporary() -> AbstractContextManager[str]:
    """A folder in memory, where there is room: thousands of syncs take no time there."""
    has_room = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30
    return tempfile.TemporaryDirectory(dir="/dev/shm" if has_room else None, prefix="superoffload-test-")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with temporary() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """The folder of a checkpoint."""
    with temporary() as folder:
        yield save_two_steps(Path(folder))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Another seed's, after one step: a load that is refused must leave it as it is."""
    run = Run(3, torch.bfloat16)
    run.steps(range(1))
    yield run
    run.optimizer.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[tuple[nn.Module, AdamW]]:
    """Loads what others have saved."""
    model = model_of(seed=8)
    with AdamW(model.parameters(), threads=1) as optimizer:
        yield model, optimizer
