"""Times a training iteration on the CPU with and without second copies of gradients and parameters, and torch's.

    python -m benchmarks.in_place --out benchmarks/results/in_place.json

Every contestant has bf16 parameters, fp32 masters and moments, and clips by the global norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results_file import write_rows
from benchmarks.timing import Contestant, Rounds, interleave, timed
from superoffload import AdamW

IN_PLACE, COPIED, TORCH = "in place", "copied", "torch fused"
_NORM = 1.0  # of gradients that hardly ever clip

Row = dict[str, Any]


class Model:
    """Has a backward that costs little beside the optimizer: each gradient is a constant."""

    def __init__(self, count: int, numel: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(0.02 * torch.randn(numel, generator=random).bfloat16()) for _ in range(count)]
        self._gradients = [1e-5 * torch.randn(numel, generator=random).bfloat16() for _ in range(count)]

    def backward(self) -> None:
        for param, gradient in zip(self.params, self._gradients, strict=True):
            param.grad = None
            param.backward(gradient)


class OverMasters:
    """Does with torch's fused AdamW what ours do: fp32 masters, a clip, bf16 parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._masters = [nn.Parameter(param.detach().float()) for param in params]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True)
        self.bytes_per_param = 16.0  # masters, moments, and fp32 gradients, which are kept

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() if master.grad is None else master.grad.copy_(param.grad)
        nn.utils.clip_grad_norm_(self._masters, _NORM)
        self._optimizer.step()
        torch._foreach_copy_(list(self._params), list(self._masters))


def run_in_place(count: int, numel: int, seconds: float) -> list[Row]:
    """Returns a row per contestant: seconds of an iteration, host bytes per parameter beside parameter and gradient."""
    with ExitStack() as stack:
        contestants: list[Contestant] = []
        kept: dict[str, Callable[[], float]] = {}
        for name, mode in ((IN_PLACE, "never"), (COPIED, "always")):
            model = Model(count, numel)
            ours = stack.enter_context(AdamW(model.params, speculation=mode, max_grad_norm=_NORM))
            contestants.append(_contestant(name, model, ours.step))
            kept[name] = lambda ours=ours: float(ours.stats()["host_bytes"]) / (count * numel)  # type: ignore[misc]
        model = Model(count, numel)
        theirs = OverMasters(model.params)
        contestants.append(_contestant(TORCH, model, theirs.step))
        kept[TORCH] = lambda: theirs.bytes_per_param
        samples = interleave(contestants, Rounds(5, 200, seconds))
        default = samples[IN_PLACE, ""]
        return [
            {
                "name": one.contestant.name,
                "numel": count * numel,
                "seconds_median": one.median,
                "host_bytes_per_param": kept[one.contestant.name](),
                "ratio_to": IN_PLACE,
                "ratio": one.ratio_to(default),
            }
            for one in samples.values()
        ]


def _contestant(name: str, model: Model, step: Callable[[], Any]) -> Contestant:
    def iteration() -> None:
        model.backward()
        step()

    return Contestant(name, "", 0.0, timed(iteration), settles=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all contestants in turn, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_place", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=48, help="parameters")
    parser.add_argument("--numel", type=int, default=1 << 20, help="elements of each")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = run_in_place(args.count, args.numel, args.seconds)
    print(f"{'optimizer':12} {'ns per parameter':>16} {'times as long':>13} {'host bytes per parameter':>25}")
    for row in rows:
        nanoseconds = 1e9 * row["seconds_median"] / row["numel"]
        print(f"{row['name']:12} {nanoseconds:16.3f} {row['ratio']:13.2f} {row['host_bytes_per_param']:25.2f}")
    write_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
