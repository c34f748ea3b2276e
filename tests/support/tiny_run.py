"""Runs of `superoffload train` and `verify` that take a second."""

from __future__ import annotations

import argparse

# One source file of the standard library is text enough, and quicker to find than all of them.
SIZES = (
    f"--data {argparse.__file__} --layers 1 --hidden 32 --heads 2 --kv-heads 1 --mlp 48 --sequence 32 --batch 4 "
    f"--bucket-numel 4096 --torch-threads 1"
)
TINY = f"{SIZES} --threads 1 --eval-every 10"
