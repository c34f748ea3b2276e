"""Computes our targets from the rows: met, missed, or not measured and why.

* An iteration takes at most 1.15 times max(everything on the device, one plain CPU pass, one transfer each way).
  Both directions run at once, so a transfer each way counts as long as the slower of the two.
* The exposed optimizer time (iteration minus forward and backward alone) is at most a third of the best peer's.
* GPU memory is at most that of the leanest peer plus 5 %.
* Random delays change no bit; a race that crashed or did not end has not shown it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu_suite.contestants import ALL_ON_DEVICE, BARE, CONTESTANTS, OURS, OURS_CLIPPED
from benchmarks.gpu_suite.jobs import DONE, FAILED, NOT_HERE, TIMED_OUT

Row = Mapping[str, Any]
Setting = tuple[int, bool]  # tokens per step, and whether GPU memory is capped

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
ITERATION, EXPOSED, MEMORY = 1.15, 1 / 3, 1.05
_BF16 = 2  # bytes per parameter and direction


@dataclass(frozen=True)
class Target:
    """Compares ``value`` with ``bound``; ``why``: what is missing for it."""

    name: str
    verdict: str
    value: float | None = None
    bound: float | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def setting_of(row: Row) -> Setting | None:
    """Returns a training row's setting; None for other rows."""
    settings = row["settings"]
    return (settings["tokens"], settings["capped_gib"] is not None) if settings.get("what") == "train" else None


def setting_name(setting: Setting) -> str:
    return f"{setting[0]} tokens{', capped' if setting[1] else ''}"


def trained(rows: Sequence[Row], setting: Setting) -> dict[str, Row]:
    """Returns results by contestant, without those that have no times."""
    done = (row for row in rows if setting_of(row) == setting and row["status"] == DONE)
    return {row["settings"]["contestant"]: row["result"] for row in done if row["result"].get("seconds_median")}


def exposed_seconds(results: Mapping[str, Row]) -> dict[str, float]:
    """Returns by contestant how much longer an iteration takes than forward and backward alone, in one process."""
    found = {name: max(0.0, row["seconds_median"] - row["bare_seconds"]) for name, row in results.items()}
    return {name: seconds for name, seconds in found.items() if name != BARE}


def _bound(rows: Sequence[Row], tokens: int) -> tuple[float, list[str]]:
    """Returns the bound of an iteration, and what is missing for it; all-on-device rows are never capped."""
    device = trained(rows, (tokens, False)).get(ALL_ON_DEVICE)
    machine = {row["key"]: row["result"] for row in rows if row["key"] in ("adam", "link") and row["status"] == DONE}
    missing = [] if device else [f"{ALL_ON_DEVICE} at {tokens} tokens"]
    missing += [name for name in ("adam", "link") if name not in machine]
    if device is None or missing:
        return 0.0, missing
    parameters, link = device["parameters"], machine["link"]
    transfer = _BF16 * parameters / (1e9 * min(link["down_gb_per_s"], link["up_gb_per_s"]))
    return max(device["seconds_median"], machine["adam"]["step_seconds_per_param"] * parameters, transfer), []


def all_targets(rows: Sequence[Row]) -> list[Target]:
    settings = dict.fromkeys(setting for row in rows if (setting := setting_of(row)) is not None)
    return [*(target for setting in settings for target in _of(rows, setting)), *_races(rows)]


def _of(rows: Sequence[Row], setting: Setting) -> Iterator[Target]:
    name, results = setting_name(setting), trained(rows, setting)
    bound, missing = _bound(rows, setting[0])
    times = {who: result["seconds_median"] for who, result in results.items()}
    imagined = any(result["device"] in ("cpu", "stand-in") for result in results.values())
    for who in (OURS, OURS_CLIPPED):
        absent = [*missing, *([] if who in times else [who])]
        ratio = None if absent else times[who] / bound
        yield _judged(f"{name}: {who}, iteration over the bound", ratio, ITERATION, ", ".join(absent), imagined)
    ratio, why = _over_best_peer(exposed_seconds(results))
    yield _judged(f"{name}: {OURS}, exposed time over the best peer's", ratio, EXPOSED, why, imagined)
    used = {who: float(row["gpu_used_bytes"]) for who, row in results.items() if row.get("gpu_used_bytes")}
    ratio, why = _over_best_peer(used)
    yield _judged(f"{name}: {OURS}, GPU memory over the leanest peer's", ratio, MEMORY, why, imagined)


def _over_best_peer(values: Mapping[str, float]) -> tuple[float | None, str]:
    """Returns ours over the least of a peer, or what is missing; a peer's 0 cannot be told from noise."""
    peers = [value for name, value in values.items() if CONTESTANTS[name].kind == "peer"]
    if OURS not in values or not peers or not min(peers):
        return None, OURS if OURS not in values else "a peer"
    return values[OURS] / min(peers), ""


def _judged(name: str, value: float | None, bound: float, missing: str = "", imagined: bool = False) -> Target:
    """``imagined``: on a CPU, where times say nothing."""
    if value is None:
        return Target(name, NOT_MEASURED, why=f"missing: {missing}")
    if imagined:
        return Target(name, NOT_MEASURED, value, bound, "on a CPU, where nothing overlaps")
    return Target(name, MET if value <= bound else MISSED, value, bound)


def _races(rows: Sequence[Row]) -> Iterator[Target]:
    for row in rows:
        if row["settings"].get("what") != "races":
            continue
        title = f"{row['key']}: runs with delays that differ"
        if row["status"] == DONE:
            yield _judged(title, float(len(row["result"]["different_seeds"])), 0.0)
        else:
            verdict = NOT_MEASURED if row["status"] == NOT_HERE else MISSED
            yield Target(title, verdict, why=f"{row['status']}: {row['error']}")


def is_wrong(row: Row) -> bool:
    """Returns whether something that should work did not; a peer's failure is listed and says nothing of ours."""
    settings, result = row["settings"], row.get("result") or {}
    kind = CONTESTANTS[settings["contestant"]].kind if settings.get("what") == "train" else ""
    if row["status"] in (FAILED, TIMED_OUT):
        return kind != "peer" and settings.get("what") != "deepspeed kernel"
    if kind == "ours":  # a loss that is not finite is None
        return "out_of_memory" in result or result.get("final_loss", 0.0) is None
    return bool(result.get("different_seeds"))
