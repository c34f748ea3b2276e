"""`superoffload bench transfer`: formats on the link between a CUDA device and host memory."""

from __future__ import annotations

import argparse
from typing import Any

from superoffload.cli import measurement
from superoffload.cli.options import add_option
from superoffload.errors import ArgumentError

_DTYPES = ("bf16", "fp16", "fp32")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "transfer",
        help="transfer policies, on a GPU",
        description="Times one bucket on its way to the host, through the processors and back: in its own format with "
        "the cast fused into the kernels (narrow), in fp32 with the cast on the device (wide), and with stores of the "
        "pack kernel straight into host memory (direct). Needs a CUDA device.",
    )
    add_option(parser, "--numel", type=int, default=1 << 25, help="parameters of the bucket")
    add_option(parser, "--rounds", type=int, default=10, help="of each policy")
    add_option(parser, "--dtype", choices=_DTYPES, default="bf16", help="of parameters and gradients")
    parser.add_argument("--quick", action="store_true", help="a small bucket, few rounds")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    return parser


def run(args: argparse.Namespace) -> int:
    for name in ("numel", "rounds"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"{name}={getattr(args, name)}: expected at least 1")
    from superoffload.benchmarking.transfer import on_this_gpu, run_transfer

    facts = measurement.begin(args)
    numel, rounds = (1 << 20, 2) if args.quick else (args.numel, args.rounds)
    rows, chosen = run_transfer(on_this_gpu(), args.dtype, numel, rounds)
    for row in rows:
        print(
            f"{row['name']:7} {row['bytes_per_param']} bytes each way   down {row['down_gb_per_s']:7.2f} GB/s   "
            f"step {1e9 * row['step_seconds_per_param']:7.3f} ns per parameter   up {row['up_gb_per_s']:7.2f} GB/s   "
            f"slowest part x {row['ratio']:.2f}{'   <- chosen' if row['name'] == chosen else ''}"
        )
    measurement.write(args, {**facts, "limit": None, "chosen": chosen, "rows": rows})
    return 0
