"""A GPU that a test has broken stays broken for its process, and would fail every test after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Before a GPU is used: without it torch refuses to multiply matrices where only deterministic kernels are allowed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

_BROKEN = 70


@pytest.fixture(autouse=True)
def device_still_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends a worker process of pytest-xdist whose device does not answer any more: its successor has a working one."""
    yield
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"{request.node.nodeid} has broken the device: {error}", file=sys.stderr, flush=True)
            os._exit(_BROKEN)
