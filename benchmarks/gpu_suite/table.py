"""Prints the final table: one line per contestant and setting, then the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_suite.jobs import DONE
from benchmarks.gpu_suite.targets import Found, Target, exposed_seconds

_GIB = 1 << 30
_SHORT = 3900  # bytes that are sure to be seen if only the end of the output is
_WHY = 60  # characters of an error in the short table
_CUT = "... the rest: python -m benchmarks.gpu_suite --report gpu_suite.json"


def table(rows: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> str:
    """Returns the whole table."""
    return "\n".join([*_trust(rows), *_machine(Found(rows)), *_training(rows), *_others(rows), *_targets(targets)])


def short_table(rows: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> str:
    """Returns at most 4 KB: without unmeasured targets, and cut off at the end if it is still too long."""
    measured = [target for target in targets if target.value is not None or target.verdict == "missed"]
    training = [*_training(rows, _WHY), *_others(rows, _WHY)]
    lines = [*_trust(rows, _WHY), *_machine(Found(rows)), *training, *_targets(measured)]
    found: list[str] = []
    for line in lines:
        if sum(len(each.encode()) + 1 for each in [*found, line, _CUT]) > _SHORT:
            return "\n".join([*found, _CUT])
        found.append(line)
    return "\n".join(found)


def _trust(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Iterator[str]:
    """Yields smoke, tests, races and everything else besides training: their results, or why there are none."""
    for row in rows:
        what = row["settings"].get("what")
        if what in ("train", "trainer", "published") or (
            row["status"] == DONE and what not in ("smoke", "tests", "races")
        ):
            continue
        yield f"{row['key']}: {_outcome(row)[:width]}"


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] != DONE:
        return f"{row['status']}: {row['error']}"
    if row["settings"]["what"] == "tests":
        return str((row.get("output", "").strip().splitlines() or ["no output"])[-1].strip("= "))
    result = row["result"]
    if row["settings"]["what"] == "races":
        return f"{len(result['different_seeds'])} of {len(result['seeds'])} runs with delays differ"
    if "unchecked" in result:
        return f"not checked: {result['unchecked']}"
    if "errors" in result:
        return f"ok, {result['errors']} errors"
    ways = ["flag" if facts.get("uses_flag") else "event" for facts in result["ways"].values()]
    return f"ok, arrivals by {' and '.join(ways)}"


def _machine(found: Found) -> Iterator[str]:
    link, adam, threads = (found.machine(what) for what in ("link", "adam", "adam, by threads"))
    if link is not None:
        yield (
            f"link: down {link['down_gb_per_s']:.1f} GB/s, up {link['up_gb_per_s']:.1f} GB/s, "
            f"together {link['both_gb_per_s']:.1f} GB/s each way ({link['device']})"
        )
    if adam is not None:
        yield f"CPU step: {1e9 * adam['step_seconds_per_param']:.3f} s per 10^9 parameters, {adam['threads']} threads"
    if threads is not None:
        times = [f"{count}: {1e9 * seconds:.3f}" for count, seconds in threads["by_threads"].items()]
        yield f"CPU step by threads, s per 10^9 parameters: {', '.join(times)}"


def _training(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Iterator[str]:
    found = Found(rows)
    for setting in found.settings():
        tokens, capped = setting
        exposed = exposed_seconds(found, setting)
        yield _heading(f"{tokens} tokens per step{', GPU memory capped' if capped else ''}")
        for row in found.rows:
            settings = row["settings"]
            if settings.get("what") == "train" and (settings["tokens"], settings["capped_gib"] is not None) == setting:
                yield _line(row, exposed, width)


def _heading(text: str) -> str:
    return f"{text:<34}{'ms/step':>9}{'tokens/s':>9}{'exposed':>8}{'GPU GiB':>8}{'host':>7}{'loss':>7}"


def _others(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Iterator[str]:
    """Yields Trainer's rows, and the published evaluation's, whose memory and loss are those of the first rank."""
    before = ""
    for row in Found(rows).rows:
        settings = row["settings"]
        if settings.get("what") == "published":
            title = f"hidden {settings['model']['hidden']}, ranks: {settings['ranks']}"
        elif settings.get("what") == "trainer":
            title = f"Trainer, {settings['tokens']} tokens per step"
        else:
            continue
        if title != before:
            yield _heading(title)
        before = title
        yield _line(row, {}, width)


def _line(row: Mapping[str, Any], exposed: Mapping[str, float], width: int | None) -> str:
    settings = row["settings"]
    name = settings["contestant"]
    result = row.get("result") or {}
    if "seconds_median" not in result:
        why = result.get("missing") or ("out of memory" if "out_of_memory" in result else None)
        why = why or f"{row['status']}: {row.get('error', '')}"
        return f"  {name:<32}{why[:width]}"
    seconds = 1e3 * result["seconds_median"]
    shown = f"{1e3 * exposed[name]:8.1f}" if name in exposed else " " * 8
    return (
        f"  {name:<32}{seconds:9.1f}{result['tokens_per_second']:9.0f}{shown}"
        f"{_gib(result.get('gpu_used_bytes')):>8}{_gib(result['host_peak_resident_bytes']):>7}"
        f"{result['final_loss']:7.3f}{_fates(result.get('timed') or {})}"
    )


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / _GIB:.1f}"


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
        if target.value is None or target.bound is None:
            yield f"  {target.verdict:<13}{target.name}{why}"
        else:
            yield f"  {target.verdict:<13}{target.name}: {target.value:.2f}, at most {target.bound:.2f}{why}"
