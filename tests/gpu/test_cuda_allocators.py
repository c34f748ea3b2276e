"""torch's other allocators: memory that grows in place, and CUDA's own pools. Each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.gpu.on_allocator import SETTINGS
from tests.support.checkout import ROOT

# Without a GPU the program is tried once, without the allocator.
TRIED = (("stand-in", "expandable segments"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in SETTINGS))
# The first is the name since torch 2.9.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(("device", "name"), TRIED)
def test_bits_with_another_allocator(device: str, name: str) -> None:
    settings = dict.fromkeys(VARIABLES, SETTINGS[name])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **settings}
    command = [sys.executable, "-m", "tests.gpu.on_allocator", device, name]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=45)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {"wrong": [], "in_use": None if device == "stand-in" else True}, ended.stderr
