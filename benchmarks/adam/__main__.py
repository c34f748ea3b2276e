"""The kernels against the memory's limit and against other libraries."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, style
from benchmarks.adam import states
from benchmarks.adam.accuracy import accuracy_text
from benchmarks.adam.kernels import (
    DEEPSPEED,
    JOB,
    OPERATIONS,
    TORCH,
    Row,
    check_memory,
    limit_name,
    run_adam,
)
from benchmarks.adam.peers import PEERS, PeerMissing
from benchmarks.training.config import STATE_SETTINGS
from superoffload import kernels
from superoffload.errors import ArgumentError
from superoffload.host.processors import allowed_cpus

_SIZES = [1 << power for power in range(10, 29, 2)]  # 1 k to 256 M
_QUICK = 1 << 22


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "adam",
        "Times step, journaled step, undo, replay and publish of every instruction set of this machine against a walk "
        "over the same memory, torch's fused AdamW and DeepSpeedCPUAdam, interleaved.",
    )
    command.add_option(parser, "--numel", type=int, default=1 << 26, help="elements of the large arrays")
    parser.add_argument("--sizes", type=int, nargs="*", metavar="N", help="of the growth curve (default: 1 k to 256 M)")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="(default: 1, powers of two, all)")
    parser.add_argument("--isas", nargs="+", metavar="NAME", help="instruction sets (default: all of this machine)")
    command.add_option(parser, "--seconds", type=float, default=30.0, help="for each of the large tables")
    parser.add_argument(
        "--state",
        choices=(*STATE_SETTINGS, "all"),
        help="compare this setting of masters and moments with the default (fp32), and nothing else; all: every "
        "setting, and other libraries' 8-bit and 4-bit moments, where they are installed",
    )
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "numel", "seconds")
    cpus = len(allowed_cpus())
    powers = [1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus]
    threads = sorted({*(args.threads or [*powers, cpus])})
    if threads[0] < 1 or threads[-1] > cpus:
        raise ArgumentError(f"threads={threads}: expected numbers from 1 to {cpus}, the processors of this process")
    available = kernels.available_isas()
    isas = [isa for isa in available if isa in (args.isas or available)]  # the best one last
    if not isas:
        raise ArgumentError(f"isas={args.isas}: expected some of {', '.join(available)}")
    sizes = _SIZES if args.sizes is None else args.sizes
    numel, seconds = args.numel, args.seconds
    if args.quick:
        numel, sizes, seconds = _QUICK, [size for size in sizes if size <= _QUICK], 1.0
    if args.state is not None:
        return _states(args.state, numel, threads[-1], isas[-1], seconds)
    check_memory(max(numel, *sizes) if sizes else numel)
    report: dict[str, Any] = {"settings": {"numel": numel, "isas": isas, "threads": threads}}
    report |= run_adam(numel, sizes, threads, isas, seconds)
    print(_table(report["rows"]))
    print(accuracy_text(report["accuracy"]))
    for name, state in report["peers"].items():
        print(f"peer {name}: {state}")
    return report


def _states(asked: str, numel: int, threads: int, isa: str, seconds: float) -> dict[str, Any]:
    forms = list(STATE_SETTINGS) if asked == "all" else list(dict.fromkeys((states.DEFAULT, asked)))
    check_memory(numel * len(forms))
    peers = []
    for name in PEERS if asked == "all" else ():
        try:
            PEERS[name].check()
            peers.append(name)
        except PeerMissing as why:
            print(f"peer {name}: {why}")
    with kernels.using_isa(isa):
        rows = states.run_forms(numel, threads, isa, forms, seconds, peers)
    print(states.table(rows))
    return {"settings": {"numel": numel, "isa": isa, "threads": threads}, "rows": rows}


def _table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':36} {'isa':7} {'threads':>7} {'elements':>12} {'median ms':>10} {'min ms':>9} {'GB/s':>6} "
        f"{'of limit':>8} {'x step':>7}"
    ]
    for row in rows:
        of_limit = "" if row["of_limit"] is None else f"{row['of_limit']:.2f}"
        lines.append(
            f"{row['name']:36} {row['isa']:7} {row['threads']:>7} {row['numel']:>12,} "
            f"{row['seconds_median'] * 1e3:>10.3f} {row['seconds_min'] * 1e3:>9.3f} "
            f"{row['gb_per_s']:>6.1f} {of_limit:>8} {row['ratio']:>7.2f}"
        )
    return "\n".join(lines)


# ---- the picture ----------------------------------------------------------------------------------------------------


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws operations against their limits, and how the time of a step grows with size and threads."""
    if "state" in report["rows"][0]:
        states.plot(report, path)
        return
    rows, numel, isas = report["rows"], report["settings"]["numel"], report["settings"]["isas"]
    most = max(row["threads"] for row in rows)
    with style.drawing(path, 9.5, 7.6) as figure:
        grid = figure.add_gridspec(2, 2)
        bars, sizes, threads = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
        _draw_operations(bars, list(_of(rows, threads=most, numel=numel)), isas)
        bars.set_title(f"Milliseconds for {numel / 1e6:.0f} M parameters, {most} threads")
        per_param = {"threads": most, "isas": ("", isas[-1])}
        _draw_lines(sizes, rows, "numel", lambda row: 1e9 * row["seconds_median"] / row["numel"], **per_param)
        sizes.set_xscale("log", base=2)
        sizes.set_yscale("log")
        sizes.set_xlabel("elements")
        sizes.set_title(f"Nanoseconds per parameter, {most} threads, {isas[-1]}")
        _draw_lines(threads, rows, "threads", lambda row: float(row["gb_per_s"]), numel=numel, isas=("", isas[-1]))
        threads.set_xlabel("threads")
        threads.set_xticks(sorted({row["threads"] for row in rows}))
        threads.set_ylim(bottom=0)
        threads.set_title(f"GB/s, {numel / 1e6:.0f} M parameters, {isas[-1]}")


def _of(rows: Sequence[Row], **wanted: Any) -> Iterator[Row]:
    """Yields the rows with these values; ``isas``: any of several instruction sets."""
    isas = wanted.pop("isas", None)
    for row in rows:
        if all(row[key] == value for key, value in wanted.items()) and (isas is None or row["isa"] in isas):
            yield row


def _draw_operations(axes: Any, rows: Sequence[Row], isas: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    milliseconds = {(row["name"], row["isa"]): 1e3 * row["seconds_median"] for row in rows}
    shown = [isa for isa in isas if isa != "scalar"] or list(isas)
    width = 0.8 / (len(shown) + 1)
    colours = dict(zip(shown, (style.PALE_BLUE, style.BLUE, style.GREEN), strict=False))
    names = [*OPERATIONS, *(JOB.format(peer) for peer in (TORCH, DEEPSPEED) if (JOB.format(peer), "") in milliseconds)]
    for place, name in enumerate(names):
        bars = [(limit_name(name), "", style.GRID), *((name, isa, colour) for isa, colour in colours.items())]
        if name not in OPERATIONS:  # a peer: one bar, in the middle
            bars = [("", "", ""), (name, "", style.ORANGE)]
        for index, (row, isa, colour) in enumerate(bars):
            if row:
                axes.bar(place + index * width, milliseconds[row, isa], width, color=colour)
    labels = [name.replace(", ", ",\n").replace("CPUAdam", "") for name in names]  # short, as they stand side by side
    axes.set_xticks([place + width for place in range(len(names))], labels)
    legend = [("memory limit", style.GRID), *colours.items(), ("peer", style.ORANGE)]
    axes.legend(handles=[Patch(color=colour, label=label) for label, colour in legend], ncols=len(legend))
    axes.grid(axis="x", visible=False)


def _draw_lines(axes: Any, rows: Sequence[Row], x: str, y: Callable[[Row], float], **fixed: Any) -> None:
    colours = {limit_name("step"): style.MUTED, "step": style.BLUE, "journaled": style.ORANGE}
    for name, colour in colours.items():
        points = sorted((row[x], y(row)) for row in _of(rows, name=name, **fixed))
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1.4, label=name)
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run, plot))
