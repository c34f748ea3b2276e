"""What is printed at the end: one line per contestant and setting, then the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_suite.contestants import CONTESTANTS
from benchmarks.gpu_suite.targets import Found, Target, exposed_seconds
from superoffload.benchmarking.jobs import DONE

_GIB = 1 << 30


def table(rows: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> str:
    return "\n".join([*_machine(Found(rows)), *_training(rows), *_targets(targets), *_problems(rows)])


def _machine(found: Found) -> Iterator[str]:
    link, pack, adam = (found.machine(what) for what in ("link", "pack", "adam"))
    if link is not None:
        yield (
            f"link: down {link['down_gb_per_s']:.1f} GB/s, up {link['up_gb_per_s']:.1f} GB/s, "
            f"together {link['both_gb_per_s']:.1f} GB/s each way ({link['device']})"
        )
    if pack is not None:
        ways = {name.removesuffix("_of_copy"): share for name, share in pack.items() if name.endswith("_of_copy")}
        known = [f"{name} {share:.2f} of a copy's speed" for name, share in ways.items()]
        missing = [f"{name}: {why}" for name, why in pack["missing_ways"].items()]
        yield "pack: " + "; ".join([*known, *missing])
    if adam is not None:
        yield f"CPU step: {1e9 * adam['step_seconds_per_param']:.3f} s per 10^9 parameters, {adam['threads']} threads"


def _training(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = Found(rows)
    for setting in found.settings():
        tokens, capped = setting
        exposed = exposed_seconds(found, setting)
        yield ""
        yield (
            f"{f'{tokens} tokens per step' + (', GPU memory capped' if capped else ''):<38}"
            f"{'iteration':>11}{'tokens/s':>10}{'exposed':>10}{'GPU GiB':>9}{'host GiB':>9}{'loss':>9}"
        )
        for row in rows:
            settings = row["settings"]
            if settings.get("what") == "train" and (settings["tokens"], settings["capped_gib"] is not None) == setting:
                yield _line(row, exposed)


def _line(row: Mapping[str, Any], exposed: Mapping[str, float]) -> str:
    name = row["settings"]["contestant"]
    result = row.get("result") or {}
    if "seconds_median" not in result:
        why = result.get("missing") or ("out of memory" if "out_of_memory" in result else None)
        return f"  {name:<36}{why or row['status'] + ': ' + row.get('error', '')}"
    seconds = 1e3 * result["seconds_median"]
    shown = f"{1e3 * exposed[name]:8.1f} ms" if name in exposed else " " * 11
    return (
        f"  {name:<36}{seconds:8.1f} ms{result['tokens_per_second']:10.0f}{shown:>11}"
        f"{_gib(result.get('gpu_used_bytes')):>8}{_gib(result['host_peak_resident_bytes']):>9}"
        f"{result['final_loss']:9.4f}"
    )


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / _GIB:.2f}"


def _targets(targets: Sequence[Target]) -> Iterator[str]:
    if targets:
        yield ""
        yield "targets"
    for target in targets:
        why = f" ({target.why})" if target.why else ""
        if target.value is None or target.bound is None:
            yield f"  {target.verdict:<13}{target.name}{why}"
        else:
            yield f"  {target.verdict:<13}{target.name}: {target.value:.2f}, at most {target.bound:.2f}{why}"


def _problems(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Everything besides training rows that gave no result, and what the tests said."""
    for row in rows:
        if row["key"] == "tests" and row["status"] == DONE:
            yield "GPU tests: " + (row["output"].strip().splitlines() or ["no output"])[-1]
        elif row["status"] != DONE and row["settings"].get("what") not in ("train", "races"):
            yield f"{row['key']}: {row['status']}: {row.get('error', '')}"


def descriptions() -> str:
    return "\n".join(f"  {name:<38}{entry.kind:<7}{entry.text}" for name, entry in CONTESTANTS.items())
