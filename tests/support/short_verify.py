"""Runs `superoffload verify` for several ranks in seconds: with the arguments of the command line and ``SHORT``."""

from __future__ import annotations

import sys
from unittest import mock

from superoffload.tools.cli import main
from superoffload.tools.convergence.convergence_setup import Setup

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
    with mock.patch.object(Setup, "for_ranks", lambda given, count: SHORT):
        sys.exit(main(["verify", *sys.argv[1:]]))
