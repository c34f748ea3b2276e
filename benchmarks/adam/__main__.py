"""The kernels against the memory's limit and against other libraries."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, style
from benchmarks.adam.accuracy import accuracy_table, accuracy_text, errors_of_state
from benchmarks.adam.kernels import DEEPSPEED, DEFAULT, JOB, OPERATIONS, TORCH, Row, check_memory, limit_name, measure
from benchmarks.adam.peers import PEERS, PeerMissing, load_deepspeed
from benchmarks.report import installed
from benchmarks.training.config import STATE_SETTINGS
from superoffload import kernels
from superoffload.errors import ArgumentError
from superoffload.host.processors import allowed_cpus

_SIZES = [1 << power for power in range(10, 29, 2)]  # 1 k to 256 M
_QUICK = 1 << 22
_ACCURACY_NUMEL = 1 << 18


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
    report |= _kernels(numel, sizes, threads, isas, seconds)
    print(_table(report["rows"]))
    print(accuracy_text(report["accuracy"]))
    for name, state in report["peers"].items():
        print(f"peer {name}: {state}")
    return report


def _kernels(
    numel: int, sizes: Sequence[int], threads: Sequence[int], isas: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Measures all operations on arrays far larger than the caches, with all threads and with one, beside the same job
    done by peers; then how time grows with size and threads."""
    deepspeed, state = None, ""
    try:
        deepspeed = load_deepspeed()
    except PeerMissing as missing:
        state = str(missing)
    most = max(threads)
    rows: list[Row] = []
    for count in sorted({1, most}, reverse=True):
        rows += measure(numel, count, isas, seconds, deepspeed=deepspeed)
    grid = [(size, most) for size in sizes if size != numel]
    grid += [(numel, count) for count in threads if count not in (1, most)]
    for size, count in grid:
        rows += measure(size, count, isas[-1:], min(2.0, seconds), only=("step", "journaled"))
    peers = {"torch.optim.AdamW(fused=True)": f"torch {torch.__version__}"}
    peers[DEEPSPEED] = state or f"deepspeed {installed('deepspeed')['deepspeed']}"
    accuracy = accuracy_table(_ACCURACY_NUMEL, deepspeed)
    return {"limit": next(_of(rows, name=limit_name("step"))), "rows": rows, "accuracy": accuracy, "peers": peers}


def _states(asked: str, numel: int, threads: int, isa: str, seconds: float) -> dict[str, Any]:
    """Measures what each setting of masters and moments costs per step, with the best instruction set."""
    forms = list(STATE_SETTINGS) if asked == "all" else list(dict.fromkeys((DEFAULT, asked)))
    check_memory(numel * len(forms))
    peers = []
    for name in PEERS if asked == "all" else ():
        try:
            PEERS[name].check()
            peers.append(name)
        except PeerMissing as why:
            print(f"peer {name}: {why}")
    rows = measure(numel, threads, [isa], seconds, forms=forms, peers=peers)
    errors = errors_of_state(forms, peers)
    rows = [{**row, "error": errors[row["state"]] if row["name"] == "step" else None} for row in rows]
    print(_table(rows))
    return {"settings": {"numel": numel, "isa": isa, "threads": threads}, "rows": rows}


def _table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':36} {'state':17} {'isa':7} {'threads':>7} {'elements':>12} {'median ms':>10} {'ns/param':>9} {'GB/s':>6} "
        f"{'of limit':>8} {'ratio':>7} {'error':>8}"
    ]
    for row in rows:
        of_limit = "" if row["of_limit"] is None else f"{row['of_limit']:.2f}"
        error = "" if row.get("error") is None else f"{row['error']:.1e}"
        lines.append(
            f"{row['name']:36} {row['state']:17} {row['isa']:7} {row['threads']:>7} {row['numel']:>12,} "
            f"{row['seconds_median'] * 1e3:>10.3f} {_nanoseconds(row):>9.3f} {row['gb_per_s']:>6.1f} "
            f"{of_limit:>8} {row['ratio']:>7.2f} {error:>8}"
        )
    return "\n".join(lines)


def _nanoseconds(row: Row) -> float:
    return float(1e9 * row["seconds_median"] / row["numel"])


# ---- the picture ----------------------------------------------------------------------------------------------------


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws operations against their limits, and how the time of a step grows with size and threads."""
    if "isa" in report["settings"]:
        _plot_states(report["rows"], path)
        return
    rows, numel, isas = report["rows"], report["settings"]["numel"], report["settings"]["isas"]
    most = max(row["threads"] for row in rows)
    with style.drawing(path, 9.5, 7.6) as figure:
        grid = figure.add_gridspec(2, 2)
        bars, sizes, threads = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
        _draw_operations(bars, list(_of(rows, threads=most, numel=numel)), isas)
        bars.set_title(f"Milliseconds for {numel / 1e6:.0f} M parameters, {most} threads")
        per_param = {"threads": most, "isas": ("", isas[-1])}
        _draw_lines(sizes, rows, "numel", _nanoseconds, **per_param)
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


def _plot_states(rows: Sequence[Row], path: Path) -> None:
    """Draws the time per parameter of each operation, a bar per setting, with a mark at the memory's limit."""
    names = list(OPERATIONS)
    colours = (style.MUTED, style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE)
    forms = [form for form in dict.fromkeys(row["state"] for row in rows) if form in STATE_SETTINGS]
    width = 0.8 / len(forms)
    with style.drawing(path, 11, 4.2) as figure:
        axes = figure.subplots()
        for index, (form, colour) in enumerate(zip(forms, colours, strict=False)):
            times = {row["name"]: _nanoseconds(row) for row in rows if row["state"] == form}
            places = [place + (index - (len(forms) - 1) / 2) * width for place in range(len(names))]
            axes.bar(places, [times[name] for name in names], width * 0.9, color=colour, label=form)
            walks = [times[limit_name(name)] for name in names]
            axes.hlines(walks, [x - width / 2 for x in places], [x + width / 2 for x in places], color=style.INK)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("ns per parameter")
        axes.grid(axis="x", visible=False)
        axes.set_title("Time of a pass by setting; lines: the memory's limit for the same bytes")
        figure.legend(loc="outside right upper")


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run, plot))
