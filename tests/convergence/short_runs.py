"""Runs `python -m tests.convergence` in seconds: with the arguments of the command line and ``SHORT``."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

from tests.convergence.__main__ import leave, main
from tests.convergence.setup import Setup

# Some steps are clipped, some are not. In fp32 the order of summation changes next to nothing.
SHORT = Setup(
    steps=16,
    dtype="fp32",
    max_grad_norm=1.5,
    warmup=4,
    nan_step=4,
    inf_step=7,
    late_clips=(9, 14),
    digest_every=4,
    rank_check="off",
)

if __name__ == "__main__":
    # Our own model's norms are larger than those of torchtitan's.
    short = SHORT if "titan" in sys.argv else replace(SHORT, max_grad_norm=2.5)
    with mock.patch.object(Setup, "for_ranks", lambda given, count: short):
        leave(main())
