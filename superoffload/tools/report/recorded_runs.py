"""Reads runs of `superoffload train` from their folders and checks every field, since any may be damaged."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.host.untrusted import cannot_be_read, parse_json, printable, read_bounded, read_json
from superoffload.tools.train.run_digests import STATE_PARTS

_LARGEST_METRICS = 1 << 30  # bytes: about 600 per step
_LARGEST = 1e18  # for any figure
STATS = ("clip_rate", "skipped_steps", "journal_bytes_per_param", "pinned_bytes")


@dataclass(frozen=True)
class Run:
    """Holds one run; `summary` is None if the run did not end, and then only its finished steps are known."""

    name: str
    steps: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None

    def column(self, name: str) -> list[float]:
        """Returns one value per step, NaN for a missing one."""
        return [math.nan if step.get(name) is None else float(step[name]) for step in self.steps]

    @property
    def exposed_share(self) -> list[float]:
        return [
            exposed / seconds if seconds > 0 else math.nan
            for exposed, seconds in zip(self.column("optimizer_seconds_exposed"), self.column("seconds"), strict=True)
        ]

    @property
    def settings(self) -> dict[str, Any]:
        config = dict(self.summary["config"]) if self.summary else {}
        return {**config.pop("model", {}), **config}

    def stat(self, name: str) -> float | None:
        return self.summary["stats"].get(name) if self.summary else None


def load_runs(paths: Sequence[str]) -> list[Run]:
    """Loads runs. Raises ArgumentError for a folder that is not a run's, SuperOffloadError for a damaged one."""
    names = _short_names([Path(path) for path in paths])
    return [_load(Path(path), name) for path, name in zip(paths, names, strict=True)]


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Returns the last parts of the paths, as many as it takes to tell them apart."""
    parts = [_absolute(path).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return [printable(name) for name in names]
    raise ArgumentError(f"run {paths[0]}: given twice; name different run folders")


def _absolute(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, or a circle of links
        raise cannot_be_read(path, error) from error


def _load(path: Path, name: str) -> Run:
    metrics = path / "metrics.jsonl"
    try:
        lines = read_bounded(metrics, _LARGEST_METRICS)
    except (OSError, ArgumentError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(
            f"run {path}: {metrics.name} cannot be read ({why}); expected a folder that superoffload train has written "
            "(--out)"
        ) from error
    try:
        steps = _read_steps(lines)
        summary = _read_summary(path / "summary.json")
    except ValueError as error:
        raise SuperOffloadError(f"run {path}: damaged ({error}); run it again") from error
    foreign = summary is not None and (not isinstance(summary, dict) or summary.get("command") != "train")
    if foreign or steps is None:
        raise ArgumentError(f"run {path}: not written by superoffload train; only its runs can be compared")
    if not steps:
        raise ArgumentError(f"run {path}: has no finished step yet")
    problem = _problem_of_summary(summary) if summary is not None else None
    if problem is not None:
        raise SuperOffloadError(f"run {path}: damaged ({problem}); run it again")
    return Run(name, steps, summary)


def _read_steps(lines: bytes) -> list[dict[str, Any]] | None:
    """Returns None for other programs' metrics; checks each step before the next: a file may exceed memory."""
    steps = []
    for line in io.BytesIO(lines):
        if not line.strip():
            continue
        step = parse_json(line)
        if not isinstance(step, dict) or not step.keys() >= {"step", "loss", "seconds"}:
            return None
        problem = _problem_of_step(step)
        if problem is not None:
            raise ValueError(problem)
        steps.append(step)
    return steps


def _read_summary(path: Path) -> Any:
    """Returns the summary, or None if the run did not end."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise cannot_be_read(path, error) from error


def _is_number(value: Any, *, least: float = -_LARGEST) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and least <= value <= _LARGEST


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _problem_of_step(step: Mapping[str, Any]) -> str | None:
    where = f"step {step['step']!r:.40}"
    if not _is_number(step["step"], least=0):
        return f"{where}: expected the number of a step"
    if not _is_number(step["seconds"], least=1e-9):
        return f"{where}: seconds is {step['seconds']!r:.40}, expected more than 0"
    for name in ("loss", "tokens", "optimizer_seconds", "optimizer_seconds_exposed"):
        if not _is_number_or_none(step.get(name)):
            return f"{where}: {name} is {step[name]!r:.40}, expected a number"
    return None


def _problem_of_summary(summary: Mapping[str, Any]) -> str | None:
    parts: dict[str, Any] = {name: summary.get(name) for name in ("loss", "stats", "digests", "config")}
    if not all(isinstance(one, dict) for one in parts.values()) or not isinstance(
        parts["config"].get("model", {}), dict
    ):
        return "summary.json: expected loss, stats, digests and config"
    loss, stats, digests = parts["loss"], parts["stats"], parts["digests"]
    numbers = [loss.get("held_out_after"), summary.get("peak_host_memory_bytes"), *map(stats.get, STATS)]
    if not all(map(_is_number_or_none, numbers)) or not _is_number(summary.get("parameters"), least=0):
        return "summary.json: expected numbers for losses, memory, parameters and stats"
    if not isinstance(summary.get("passed"), bool):
        return "summary.json: expected whether it passed"
    if not all(isinstance(digests.get(part), str) for part in STATE_PARTS):
        return f"summary.json: expected digests of {', '.join(STATE_PARTS)}"
    command = summary.get("command_line")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return "summary.json: expected the words of the command"
    return None
