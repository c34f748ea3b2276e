"""Prints the final table: one line per contestant and setting, then the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_suite.jobs import DONE
from benchmarks.gpu_suite.settings import GIB
from benchmarks.gpu_suite.targets import MISSED, Row, Target, exposed_seconds, setting_name, setting_of, trained

_SHORT = 3900  # bytes that are sure to be seen if only the end of the output is
_WHY = 60  # characters of an error in the short table
_CUT = "... the rest: python -m benchmarks.gpu_suite --report gpu_suite.json"


def table(rows: Sequence[Row], targets: Sequence[Target], why: int | None = None) -> str:
    """Returns the whole table; ``why``: characters of an error."""
    return "\n".join([*_trust(rows, why), *_machine(rows), *_training(rows, why), *_targets(targets)])


def short_table(rows: Sequence[Row], targets: Sequence[Target]) -> str:
    """Returns at most 4 KB: without unmeasured targets, and cut off at the end if it is still too long."""
    measured = [target for target in targets if target.value is not None or target.verdict == MISSED]
    found: list[str] = []
    for line in table(rows, measured, _WHY).splitlines():
        if sum(len(each.encode()) + 1 for each in [*found, line, _CUT]) > _SHORT:
            return "\n".join([*found, _CUT])
        found.append(line)
    return "\n".join(found)


def _trust(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yields smoke, tests, races and everything else besides training: their results, or why there are none."""
    for row in rows:
        if "contestant" not in row["settings"] and (row["status"] != DONE or not _is_of_machine(row)):
            yield f"{row['key']}: {_outcome(row)[:width]}"


def _is_of_machine(row: Row) -> bool:
    return row["settings"].get("what") in ("link", "adam", "deepspeed kernel")


def _outcome(row: Row) -> str:
    if row["status"] != DONE:
        return f"{row['status']}: {row['error']}"
    what, result = row["settings"]["what"], row["result"]
    last = str((row.get("output", "").strip().splitlines() or ["no output"])[-1]).strip("= ")
    if what == "races":
        return f"{len(result['different_seeds'])} of {len(result['seeds'])} runs with delays differ"
    if what == "tests" or "sanitizer" in row["key"]:  # which ends with a summary, unless it does not know the device
        return last
    ways = ["flag" if facts.get("uses_flag") else "event" for facts in result["ways"].values()]
    return f"ok, arrivals by {' and '.join(ways)}"


def _machine(rows: Sequence[Row]) -> Iterator[str]:
    found = {row["key"]: row["result"] for row in rows if _is_of_machine(row) and row["status"] == DONE}
    if link := found.get("link"):
        yield (
            f"link: down {link['down_gb_per_s']:.1f} GB/s, up {link['up_gb_per_s']:.1f} GB/s, "
            f"together {link['both_gb_per_s']:.1f} GB/s each way ({link['device']})"
        )
    if adam := found.get("adam"):
        yield f"CPU step: {1e9 * adam['step_seconds_per_param']:.3f} s per 10^9 parameters, {adam['threads']} threads"
    if threads := found.get("adam, by threads"):
        times = [f"{count}: {1e9 * seconds:.3f}" for count, seconds in threads["by_threads"].items()]
        yield f"CPU step by threads, s per 10^9 parameters: {', '.join(times)}"


def _training(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yields rows below a heading per setting; memory and loss of several ranks are those of the first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        settings = row["settings"]
        if (setting := setting_of(row)) is not None:
            groups.setdefault(setting_name(setting), []).append(row)
        elif settings.get("what") == "published":
            groups.setdefault(f"hidden {settings['model']['hidden']}, ranks: {settings['ranks']}", []).append(row)
        elif settings.get("what") == "trainer":
            groups.setdefault(f"Trainer, {settings['tokens']} tokens", []).append(row)
    for title, members in groups.items():
        setting = setting_of(members[0])
        exposed = {} if setting is None else exposed_seconds(trained(members, setting))
        yield f"{title:<34}{'ms/step':>9}{'tokens/s':>9}{'exposed':>8}{'GPU GiB':>8}{'host':>7}{'loss':>7}"
        yield from (_line(row, exposed, width) for row in members)


def _line(row: Row, exposed: Mapping[str, float], width: int | None) -> str:
    name, result = row["settings"]["contestant"], row.get("result") or {}
    if "seconds_median" not in result:
        why = result.get("missing") or ("out of memory" if "out_of_memory" in result else None)
        why = why or f"{row['status']}: {row.get('error', '')}"
        return f"  {name:<32}{why[:width]}"
    gpu, host = (_shown(result.get(key), 1, GIB) for key in ("gpu_used_bytes", "host_peak_resident_bytes"))
    return (
        f"  {name:<32}{1e3 * result['seconds_median']:9.1f}{result['tokens_per_second']:9.0f}"
        f"{_shown(exposed.get(name), 1, 1e-3):>8}{gpu:>8}{host:>7}{_shown(result['final_loss'], 3):>7}"
        f"{_fates(result.get('timed') or {})}"
    )


def _shown(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _fates(timed: Mapping[str, Any]) -> str:
    """Returns the fates of the timed steps' buckets, if any was clipped."""
    if not timed.get("clipped_steps"):
        return ""
    buckets = {name: timed[f"buckets_{name}"] for name in ("committed", "replayed", "stepped", "two_phase")}
    counts = ", ".join(f"{count} {name.replace('_', '-')}" for name, count in buckets.items() if count)
    return f"  {timed['clipped_steps']}/{timed['steps']} clipped: {counts}"


def _targets(targets: Sequence[Target]) -> Iterator[str]:
    if targets:
        yield "targets"
    for target in targets:
        why = f" ({target.why})" if target.why else ""
        measured = "" if target.value is None else f": {target.value:.2f}, at most {target.bound:.2f}"
        yield f"  {target.verdict:<13}{target.name}{measured}{why}"
