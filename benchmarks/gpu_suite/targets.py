"""Computes our targets from the rows: met, missed, or not measured and why.

* An iteration takes at most 1.15 times max(everything on the device, one plain CPU pass, one transfer each way).
  Both directions run at once, so a transfer each way counts as long as the slower of the two.
* The exposed optimizer time (iteration minus forward and backward alone) is at most a third of the best peer's.
* GPU memory is at most that of the leanest peer plus 5 %.
* The state after our runs is bit-for-bit that of our synchronous run (on a CPU; on a GPU the races show it).
* Random delays change no bit; a race that crashed or did not end has not shown it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_suite.contestants import ALL_ON_DEVICE, BARE, CONTESTANTS, OURS, OURS_CLIPPED, OURS_SYNCHRONOUS
from benchmarks.gpu_suite.jobs import DONE, FAILED, NOT_HERE, TIMED_OUT, with_numbers

Row = Mapping[str, Any]

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
ITERATION, EXPOSED, MEMORY = 1.15, 1 / 3, 1.05
_BF16 = 2  # bytes per parameter and direction


@dataclass(frozen=True)
class Target:
    """Compares ``value`` over ``bound`` with the aim; ``why``: what is missing for it."""

    name: str
    verdict: str
    value: float | None = None
    bound: float | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


class Found:
    """Holds the rows by what they measured."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows = with_numbers(list(rows))
        done = {row["key"]: row["result"] for row in rows if row["status"] == DONE and row.get("result")}
        self.machine: Callable[[str], Row | None] = done.get

    def settings(self) -> list[tuple[int, bool]]:
        """Returns (tokens, capped) of all training rows, in their order."""
        return list(dict.fromkeys(_setting(row) for row in self.rows if row["settings"].get("what") == "train"))

    def train(self, setting: tuple[int, bool]) -> dict[str, Row]:
        """Returns results by contestant, without those that have no times."""
        return {
            row["settings"]["contestant"]: row["result"]
            for row in self.rows
            if row["settings"].get("what") == "train"
            and _setting(row) == setting
            and row["status"] == DONE
            and math.isfinite(row["result"].get("seconds_median", math.nan))
        }


def _setting(row: Row) -> tuple[int, bool]:
    return row["settings"]["tokens"], row["settings"]["capped_gib"] is not None


def exposed_seconds(found: Found, setting: tuple[int, bool]) -> dict[str, float]:
    """Returns by contestant how much longer an iteration takes than forward and backward alone, in one process."""
    return {
        name: max(0.0, row["seconds_median"] - row["bare_seconds"])
        for name, row in found.train(setting).items()
        if name != BARE
    }


def bounds(found: Found, tokens: int) -> tuple[dict[str, float], list[str]]:
    """Returns the three bounds of an iteration in seconds, and what is missing; all-on-device rows are never capped."""
    known: dict[str, float] = {}
    missing = []
    device = found.train((tokens, False)).get(ALL_ON_DEVICE)
    adam, link = found.machine("adam"), found.machine("link")
    if device is None:
        missing.append(f"{ALL_ON_DEVICE} at {tokens} tokens")
    else:
        known[ALL_ON_DEVICE] = device["seconds_median"]
        parameters = device["parameters"]
        if adam is not None:
            known["one CPU pass"] = adam["step_seconds_per_param"] * parameters
        if link is not None:
            slower = min(link["down_gb_per_s"], link["up_gb_per_s"])
            known["one transfer each way"] = _BF16 * parameters / (slower * 1e9)
    missing += [name for name, row in (("adam", adam), ("link", link)) if row is None]
    return known, missing


def all_targets(rows: Sequence[Row]) -> list[Target]:
    found = Found(rows)
    targets = []
    for setting in found.settings():
        targets += [*_iteration(found, setting), _exposed(found, setting), _memory(found, setting)]
        targets.append(_same_bits(found, setting))
    return targets + list(_races(rows))


def _name(setting: tuple[int, bool]) -> str:
    tokens, capped = setting
    return f"{tokens} tokens{', capped' if capped else ''}"


def _judged(name: str, value: float, bound: float, device: str = "") -> Target:
    """Returns a judged target. ``device``: of a time, which says nothing on a CPU."""
    if device in ("cpu", "stand-in"):
        return Target(name, NOT_MEASURED, value, bound, "on a CPU, where nothing overlaps")
    return Target(name, MET if value <= bound else MISSED, value, bound)


def _iteration(found: Found, setting: tuple[int, bool]) -> Iterator[Target]:
    results = found.train(setting)
    known, missing = bounds(found, setting[0])
    for name in (OURS, OURS_CLIPPED):
        title = f"{_name(setting)}: {name}, iteration over the bound"
        if name not in results or missing:
            why = ", ".join([*missing, *([] if name in results else [name])])
            yield Target(title, NOT_MEASURED, why=f"missing: {why}")
        else:
            result = results[name]
            yield _judged(title, result["seconds_median"] / max(known.values()), ITERATION, result["device"])


def _exposed(found: Found, setting: tuple[int, bool]) -> Target:
    title = f"{_name(setting)}: {OURS}, exposed time over the best peer's"
    exposed = exposed_seconds(found, setting)
    peers = _peers(exposed)
    if OURS not in exposed or not peers:
        missing = [name for name in (OURS,) if name not in exposed] + ([] if peers else ["a peer"])
        return Target(title, NOT_MEASURED, why=f"missing: {', '.join(missing)}")
    best = min(peers.values())
    if best == 0.0:
        return Target(title, NOT_MEASURED, why="a peer's exposed time is below what can be told from noise")
    return _judged(title, exposed[OURS] / best, EXPOSED, found.train(setting)[OURS]["device"])


def _memory(found: Found, setting: tuple[int, bool]) -> Target:
    title = f"{_name(setting)}: {OURS}, GPU memory over the leanest peer's"
    results = found.train(setting)
    used = {name: row["gpu_used_bytes"] for name, row in results.items() if row.get("gpu_used_bytes")}
    peers = _peers(used)
    if OURS not in used or not peers:
        return Target(title, NOT_MEASURED, why="missing: a GPU, ours or a peer")
    return _judged(title, used[OURS] / min(peers.values()), MEMORY)


def _same_bits(found: Found, setting: tuple[int, bool]) -> Target:
    """Compares the bits of masters, moments and parameters."""
    title = f"{_name(setting)}: {OURS} and {OURS_SYNCHRONOUS}, parts of the state that differ"
    results = found.train(setting)
    if OURS not in results or OURS_SYNCHRONOUS not in results:
        return Target(title, NOT_MEASURED, why=f"missing: {OURS} or {OURS_SYNCHRONOUS}")
    ours, synchronous = results[OURS], results[OURS_SYNCHRONOUS]
    if "digests" not in ours or "digests" not in synchronous:
        return Target(title, NOT_MEASURED, why="gradients differ from run to run on a GPU; the races compare bits")
    different = [part for part, digest in ours["digests"].items() if synchronous["digests"][part] != digest]
    return _judged(title, float(len(different)), 0.0)


def _peers(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if CONTESTANTS[name].kind == "peer"}


def _races(rows: Sequence[Row]) -> Iterator[Target]:
    for row in rows:
        if row["settings"].get("what") != "races":
            continue
        title = f"{row['key']}: runs with delays that differ"
        if row["status"] == DONE:
            yield _judged(title, float(len(row["result"]["different_seeds"])), 0.0)
        elif row["status"] == NOT_HERE:
            yield Target(title, NOT_MEASURED, why=row["error"])
        else:
            yield Target(title, MISSED, why=f"{row['status']}: {row['error']}")


def is_wrong(row: Row) -> bool:
    """Returns whether something that should work did not; a peer's failure is listed and says nothing of ours."""
    settings, result = row["settings"], row.get("result") or {}
    kind = CONTESTANTS[settings["contestant"]].kind if settings.get("what") == "train" else ""
    if row["status"] in (FAILED, TIMED_OUT):
        return kind != "peer" and settings.get("what") != "deepspeed kernel"
    if kind == "ours":
        loss = with_numbers(result).get("final_loss", 0.0)
        return "out_of_memory" in result or not math.isfinite(loss)
    return bool(result.get("different_seeds"))
