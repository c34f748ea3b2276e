"""The list of all measurements, the most telling first; each is one process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_suite.contestants import CONTESTANTS
from benchmarks.gpu_suite.settings import Size, train_row
from superoffload.benchmarking.jobs import RESULT_PATH, Job

PYTEST_ARGUMENTS = ("-q", "-m", "gpu", "--no-header", "-p", "no:cacheprovider", "--durations=0")

# Each is compared with a synchronous, eager run without delays.
RACES = (("always", "eager"), ("adaptive", "eager"), ("never", "eager"), ("always", "on_demand"))
_RACE_SEEDS, _TOY_SEEDS = tuple(range(20)), (0, 1)
_RACE_LIMIT = 240.0


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    device: str
    size: Size
    toy: bool = False
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    tokens: tuple[int, ...] | None = None
    rows: bool = True
    races: bool = False
    tests: bool = False
    row_seconds: float = 180.0

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return self.tokens or self.size.tokens


def all_jobs(plan: Plan) -> list[Job]:
    jobs: list[Job] = []
    if plan.rows:
        jobs += _machine_jobs(plan)
        jobs += _train_jobs(plan, plan.all_tokens[:1], capped=False)
    if plan.tests:
        jobs.append(_tests())
    if plan.races:
        jobs += _race_jobs(plan)
    if plan.rows:
        jobs += _train_jobs(plan, plan.size.capped_tokens[:1], capped=True)
        jobs += _train_jobs(plan, plan.all_tokens[1:], capped=False)
        jobs += _train_jobs(plan, plan.size.capped_tokens[1:], capped=True)
    return jobs


def child(what: str, values: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_suite.child", what, json.dumps(values), RESULT_PATH]


def _tests() -> Job:
    command = [sys.executable, "-m", "pytest", *PYTEST_ARGUMENTS]
    return Job("tests", command, {}, seconds=300.0, keeps_output=True)


def _machine_jobs(plan: Plan) -> list[Job]:
    size = plan.size
    adam = {"numel": size.adam_numel, "seconds": size.adam_seconds, "with_deepspeed": not plan.toy}
    return [
        _job("link", "link", {"device_name": plan.device, "numbytes": size.copy_bytes}, plan),
        _job("adam", "adam", adam, plan),
        _job("pack", "pack", {"device_name": plan.device, "numbytes": size.copy_bytes}, plan),
    ]  # fmt: skip


def _job(key: str, what: str, values: dict[str, Any], plan: Plan, **more: Any) -> Job:
    return Job(key, child(what, values), {"what": what, **values}, plan.row_seconds, **more)


def _train_jobs(plan: Plan, tokens: tuple[int, ...], *, capped: bool) -> list[Job]:
    jobs = []
    for count in tokens:
        for name in plan.contestants:
            row = train_row(name, plan.device, plan.size, count, capped)
            key = f"{count} tokens{', capped' if capped else ''}, {name}"
            absent = CONTESTANTS[name].absent(plan.device)
            values = row.as_json()
            jobs.append(Job(key, child("train", values), {"what": "train", **values}, plan.row_seconds, absent=absent))
    return jobs


def _race_jobs(plan: Plan) -> list[Job]:
    """Alone, under torch's sanitizer, and as two ranks that share the device."""
    seeds = list(_TOY_SEEDS if plan.toy else _RACE_SEEDS)
    on_cpu = None if plan.device.startswith("cuda") else "needs a GPU"

    def race(note: str, speculation: str, delivery: str, *, ranks: int = 1, sanitizer: bool = False) -> Job:
        chosen = seeds[:2] if sanitizer else seeds
        values: dict[str, Any] = {"device": plan.device, "speculation": speculation, "delivery": delivery}
        values |= {"seeds": chosen, "ranks": ranks}
        environment = {"TORCH_CUDA_SANITIZER": "1"} if sanitizer else {}
        return Job(
            f"races, {speculation}, {delivery}{note}",
            child("races", values),
            {"what": "races", **values, **environment},
            _RACE_LIMIT,
            environment,
            on_cpu if sanitizer else None,
        )

    jobs = [race("", *variant) for variant in RACES]
    jobs += [race(", sanitizer", *variant, sanitizer=True) for variant in RACES]
    return jobs + [race(", 2 ranks", *variant, ranks=2) for variant in RACES[:2]]
