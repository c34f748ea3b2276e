"""Times a training iteration on the CPU with and without second copies of gradients and parameters, and torch's.

Every contestant has bf16 parameters, fp32 masters and moments, and clips by the global norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.timing import Contestant, Rounds, compared, timed
from superoffload import AdamW

IN_PLACE, COPIED, TORCH = "in place", "copied", "torch fused"
_NORM = 1.0  # of gradients that hardly ever clip


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser("in_place", (__doc__ or "").split("\n")[0], plot=False)
    command.add_option(parser, "--seconds", type=float, default=60.0, help="of measuring")
    return parser


def model_of(count: int, numel: int) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Returns parameters and a backward that costs little beside the optimizer: each gradient is a constant."""
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(numel, generator=random).bfloat16()) for _ in range(count)]
    gradients = [1e-5 * torch.randn(numel, generator=random).bfloat16() for _ in range(count)]

    def backward() -> None:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = None
            param.backward(gradient)

    return params, backward


def torch_step(params: Sequence[Tensor]) -> Callable[[], None]:
    """Does with torch's fused AdamW what ours do: fp32 masters, a clip, bf16 parameters. Keeps fp32 gradients."""
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, fused=True)

    @torch.no_grad()
    def step() -> None:
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() if master.grad is None else master.grad.copy_(param.grad)
        nn.utils.clip_grad_norm_(masters, _NORM)
        optimizer.step()
        torch._foreach_copy_(list(params), list(masters))

    return step


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "seconds")
    count, numel, seconds = (8, 1 << 16, 0.1) if args.quick else (48, 1 << 20, args.seconds)
    contestants: list[Contestant] = []
    kept = {TORCH: 16.0}  # bytes per parameter: masters, moments, and fp32 gradients
    with ExitStack() as stack:
        optimizers: dict[str, AdamW] = {}
        for name, mode in ((IN_PLACE, "never"), (COPIED, "always"), (TORCH, None)):
            params, backward = model_of(count, numel)
            step: Callable[[], Any] = torch_step(params)
            if mode is not None:
                optimizers[name] = stack.enter_context(AdamW(params, speculation=mode, max_grad_norm=_NORM))
                step = optimizers[name].step
            contestants.append(Contestant(name, "", 0.0, timed(_both(backward, step)), settles=True))
        rows = compared(contestants, Rounds(5, 200, seconds), IN_PLACE)
        kept |= {name: float(ours.stats()["host_bytes"]) / (count * numel) for name, ours in optimizers.items()}
    print(f"{'optimizer':12} {'ns per parameter':>16} {'times as long':>13} {'host bytes per parameter':>25}")
    for row in rows:
        row |= {"numel": count * numel, "host_bytes_per_param": kept[row["name"]]}
        nanoseconds = 1e9 * row["seconds_median"] / row["numel"]
        print(f"{row['name']:12} {nanoseconds:16.3f} {row['ratio']:13.2f} {row['host_bytes_per_param']:25.2f}")
    return {"rows": rows}


def _both(backward: Callable[[], object], step: Callable[[], object]) -> Callable[[], None]:
    def iteration() -> None:
        backward()
        step()

    return iteration


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
