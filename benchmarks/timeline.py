"""Draws three steps of a trace that ``AdamW(..., trace=...)`` wrote: lanes above each other, buckets coloured by fate.

python -m benchmarks.timeline trace.json --plot timeline.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from benchmarks import style
from superoffload.timeline import COMPUTE, PROCESSORS, VERDICT

Event = dict[str, Any]

_STEPS = 3
_COMPUTE_COLOURS = {"forward": style.PALE_BLUE, "backward": "#7d95b0", "step()": style.INK}
_LABELLED = 0.012  # of the shown width: narrower boxes have no room for a number


def plot_timeline(trace: str | PathLike[str], path: Path) -> None:
    """Draws the steps of `trace` with the most different fates."""
    text = Path(trace).read_text(encoding="utf-8").rstrip(",\n")
    closed = text if text.endswith("]") else text + "]"  # a program that was killed has not closed it
    events = [event for event in json.loads(closed) if event.get("ph") == "X"]
    shown = choose_steps(events)
    events = [event for event in events if event["args"]["step"] in shown]
    rows = sorted({(event["tid"], event["cat"]) for event in events})
    with style.drawing(path, 9.5, 0.55 * len(rows) + 1.5) as figure:
        axes = figure.subplots()
        if events:
            _draw(axes, events, [tid for tid, _ in rows])
        axes.set_yticks(range(len(rows)), [lane if lane != PROCESSORS else "processors" for _, lane in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("milliseconds")
        axes.set_title(_title(shown))


def choose_steps(events: Iterable[Event]) -> list[int]:
    """Returns the consecutive steps with the most different fates; of equals the latest, which are warmed up."""
    fates: dict[int, set[str]] = {}
    for event in events:
        known = fates.setdefault(event["args"]["step"], set())
        if event["args"].get("fate"):
            known.add(event["args"]["fate"])
    steps = sorted(fates)
    windows = [steps[i : i + _STEPS] for i in range(max(1, len(steps) - _STEPS + 1))]
    return max(windows, key=lambda window: (len(set().union(*(fates[step] for step in window))), window))


def _title(steps: Sequence[int]) -> str:
    if not steps:
        return "No step was recorded"
    return f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}"


def _draw(axes: Any, events: Sequence[Event], tids: Sequence[int]) -> None:
    first = min(event["ts"] for event in events)
    width = max(event["ts"] + event["dur"] for event in events) - first
    least = width / 700  # thinner bars would be invisible
    for event in events:
        begin, duration = (event["ts"] - first) / 1e3, max(event["dur"], least) / 1e3
        row, fate = tids.index(event["tid"]), event["args"].get("fate")
        axes.broken_barh([(begin, duration)], (row - 0.38, 0.76), color=_colour(event), linewidth=0)
        if event["cat"] in (COMPUTE, VERDICT):
            _label(axes, event["name"], begin, duration, row, 5 * _LABELLED * width / 1e3, event["cat"] == VERDICT)
        elif fate and event["cat"] == PROCESSORS:
            _label(axes, str(event["args"]["bucket"]), begin, duration, row, _LABELLED * width / 1e3, False)
    fates = dict.fromkeys(event["args"]["fate"] for event in events if event["args"].get("fate"))
    handles = [axes.barh([0], [0], color=style.FATE_COLOURS[fate], label=fate) for fate in fates]
    if handles:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(handles))
    axes.set_xlim(0, width / 1e3 * 1.005)


def _colour(event: Event) -> str:
    fate = event["args"].get("fate")
    if fate:
        return style.FATE_COLOURS[fate]
    return _COMPUTE_COLOURS.get(event["name"], style.ORANGE if event["name"] != "no clip" else style.GREEN)


def _label(axes: Any, text: str, begin: float, duration: float, row: int, room: float, beside: bool) -> None:
    if beside:
        axes.annotate(text, (begin + duration, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    elif duration >= room:
        axes.annotate(text, (begin + duration / 2, row), ha="center", va="center", fontsize=7.5, color="white")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", metavar="TRACE", help="a file that AdamW(..., trace=TRACE) wrote")
    parser.add_argument("--plot", metavar="PATH", default="timeline.png", help="the picture, a PNG")
    args = parser.parse_args()
    plot_timeline(args.trace, Path(args.plot))
