"""Shows the results of `python -m benchmarks.all`, a line per benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import DONE, FAILED, NOT_HERE, TIMED_OUT, with_numbers

Row = Mapping[str, Any]

GPU_SUITE = "gpu_suite"


def plot_path(folder: Path, name: str) -> Path:
    return folder / "plots" / f"{name}.png"


def is_wrong(row: Row) -> bool:
    return row["status"] in (FAILED, TIMED_OUT)


def summary(rows: Sequence[Row]) -> str:
    """Returns one line per benchmark."""
    return "\n".join(f"{row['key']:<12}{_outcome(row):<24}{headline(row)}" for row in rows)


def _outcome(row: Row) -> str:
    return f"{row['status']}, {row['wall_seconds']:.0f} s" if row["status"] != NOT_HERE else "not measured"


def headline(row: Row) -> str:
    """Returns a benchmark's most important figure, or why there is none."""
    if row["status"] != DONE:
        return str(row["error"])
    result = with_numbers(row["result"])
    make = _HEADLINES.get(row["key"])
    return make(result) if make is not None else f"{len(result.get('rows', []))} rows"


def _of_adam(result: Row) -> str:
    most = max(row["threads"] for row in result["rows"])
    largest = max(row["numel"] for row in result["rows"])
    table = [row for row in result["rows"] if (row["threads"], row["numel"]) == (most, largest)]
    step = [row for row in table if row["name"] == "step"][-1]
    peer = next((row for row in table if row["name"] == "torch fused, same job"), None)
    text = f"step {step['gb_per_s']:.0f} GB/s with {most} threads ({step['isa']}), {step['of_limit']:.2f} of the limit"
    return text if peer is None else f"{text}; torch takes {peer['ratio']:.2f} times as long"


def _of_journal(result: Row) -> str:
    shown = [f"{row['mean_after_step_10']:.2f} ({row['name']})" for row in result["rows"]]
    return f"bytes per parameter: {', '.join(shown)}"


def _of_memory(result: Row) -> str:
    return ", ".join(
        f"{row['resident_bytes_per_param']:.2f} bytes per parameter ({row['name']})" for row in result["rows"]
    )


def _of_state(result: Row) -> str:
    shown = [f"{row['setting']} {row['mean_difference']:+.4f}" for row in result["differences"]]
    return f"held-out loss minus that of fp32 state, {result['unit']}: {', '.join(shown)}"


def _of_ranks(result: Row) -> str:
    return ", ".join(f"rank_check={row['name']}: {row['of_step']:.2%} of a step" for row in result["rows"])


def _of_link(result: Row) -> str:
    waiting = max(row["processors_per_worker"] for row in result["rows"] if row["name"] == "waiting")
    waking = max(row["seconds_median"] for row in result["rows"] if row["name"] == "arrival to first chunk")
    return f"a waiting worker takes {waiting:.4f} of a processor, and begins {1e6 * waking:.0f} us after an arrival"


def _of_tensors(result: Row) -> str:
    row = [row for row in result["rows"] if row["name"] == "AdamW"][-1]
    cost = 1e6 * row["seconds_per_tensor"]
    text = f"AdamW adds {cost:.0f} us per tensor to backward and step(), {row['tensors']:,} tensors"
    return text if row["ratio"] is None else f"{text}; {row['ratio']:.1f} times what {row['ratio_to']} adds"


def _of_suite(result: Row) -> str:
    verdicts = [target["verdict"] for target in result["targets"]]
    return ", ".join(f"{verdicts.count(verdict)} targets {verdict}" for verdict in dict.fromkeys(verdicts))


_HEADLINES = {
    "adam": _of_adam,
    "journal": _of_journal,
    "memory": _of_memory,
    "state": _of_state,
    "ranks": _of_ranks,
    "link": _of_link,
    "tensors": _of_tensors,
    GPU_SUITE: _of_suite,
}
