"""Lists all measurements, the most telling first; each is one process.

A slot may end after any call. So the first one measures the machine's limits and ours behind smoke alone; the GPU
tests, races and peers follow in the second, and what explains the figures in the third.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.contestants import (
    ALL_ON_DEVICE,
    BARE,
    CONTESTANTS,
    FSDP2_OFFLOAD,
    FSDP2_ON_DEVICE,
    OURS,
    OURS_BF16,
    OURS_CLIPPED,
    OURS_FSDP2,
    OURS_LEAN,
    OURS_ZERO2,
    OURS_ZERO3,
    SUPEROFFLOAD,
    THREADS,
    TORCHAO,
    ZERO3_OFFLOAD,
    ZERO_OFFLOAD,
)
from benchmarks.gpu_suite.jobs import Job
from benchmarks.gpu_suite.settings import FULL, TOY, Size, TrainRow, published_row, published_sizes, train_row
from benchmarks.report import PACKAGE, ROOT
from superoffload.host.processors import allowed_cpus

SMOKE, SANITIZED, TESTS, DEEPSPEED_KERNEL = "smoke", "smoke, compute-sanitizer", "tests", "DeepSpeed's kernel"

# Hugging Face Trainer: without an optimizer's work; the same job as ours, on the device; ours.
TRAINER_WAYS = ("sgd without state", "adamw_torch_fused, fp32 parameters", "ours")
PUBLISHED = (OURS_FSDP2, FSDP2_ON_DEVICE, SUPEROFFLOAD, ZERO3_OFFLOAD, FSDP2_OFFLOAD)
# Each is compared with a synchronous, eager run without delays.
RACES = (("always", "eager"), ("always", "on_demand"), ("adaptive", "eager"), ("never", "eager"))
_TRAINER_MICRO_BATCHES = 4

# A row's sources decide when it is measured again. A peer's stays when our optimizer changes.
_SUITE = "benchmarks/gpu_suite"
_PEER_SOURCES = (
    *(f"{_SUITE}/{name}.py" for name in ("child", "contestants", "devices", "settings", "training")),
    "benchmarks/training",
)
_OUR_SOURCES = (
    *PACKAGE, *_PEER_SOURCES, "benchmarks/bandwidth",
    *(f"{_SUITE}/{name}.py" for name in ("given_gradients", "machine_rows", "races", "smoke", "trainer_rows")),
)  # fmt: skip
_TEST_SOURCES = (*_OUR_SOURCES, "tests/gpu", "tests/support", "tests/convergence", "tests/conftest.py")
# The job of tests/gpu takes two and a half minutes; it does not begin if a call has too little time for most of it.
_SECONDS_PER_TEST = 60
_TESTS_WITHOUT_A_GPU = "gets_the_gradients or kept_gradients"  # two of those that `make test` runs


@dataclass(frozen=True)
class Plan:
    """Holds what the command line asks for."""

    device: str
    toy: bool
    slot: str
    contestants: Sequence[str] | None  # instead of the slot's
    tokens: Sequence[int] | None  # likewise
    capped: bool  # of these rows
    ranks: Sequence[int] | None  # of the superchip slot; None: 1, 2 and 4, as many as there are GPUs

    @property
    def size(self) -> Size:
        return TOY if self.toy else FULL

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


def all_jobs(plan: Plan) -> list[Job]:
    if (plan.contestants or plan.tokens) and plan.slot != "superchip":
        chosen = plan.contestants or _FIVE, plan.tokens or plan.size.tokens[:1]
        jobs = _train_jobs(plan, *chosen, capped=plan.capped)
    else:
        jobs = {"first": _first, "second": _second, "third": _third, "superchip": _superchip}[plan.slot](plan)
    found = list({job.key: job for job in [_smoke(plan), *jobs]}.values())
    waiting = [place for place, job in enumerate(found) if DEEPSPEED_KERNEL in job.after]
    if waiting:
        found.insert(waiting[0], _deepspeed_kernel(plan))
    return found


_FIVE = (BARE, ALL_ON_DEVICE, OURS, OURS_CLIPPED, SUPEROFFLOAD)
_OURS, _PEERS = (tuple(name for name, entry in CONTESTANTS.items() if entry.kind == kind) for kind in ("ours", "peer"))


def _first(plan: Plan) -> Iterator[Job]:
    """Yields the machine's limits and the headline, with fp32 state and with fewer bytes."""
    yield from _machine_jobs(plan)
    yield from _train_jobs(plan, (ALL_ON_DEVICE, OURS, OURS_CLIPPED, OURS_BF16, OURS_LEAN), plan.size.tokens)


def _second(plan: Plan) -> Iterator[Job]:
    """Yields the GPU tests, races, and the peers at the headline's tokens."""
    tokens = plan.size.tokens
    yield _tests(plan)
    yield from (_race(plan, *variant) for variant in RACES[:2])
    yield from _machine_jobs(plan)
    yield from _train_jobs(plan, (ALL_ON_DEVICE, OURS, OURS_ZERO2, OURS_ZERO3, *_PEERS), tokens[:1])
    yield from _train_jobs(plan, (SUPEROFFLOAD, TORCHAO, ZERO_OFFLOAD), tokens[1:])


def _third(plan: Plan) -> Iterator[Job]:
    """Yields what ours depends on, Trainer, compute-sanitizer, capped memory, all races, the rest."""
    size = plan.size
    yield from _train_jobs(plan, _OURS, size.tokens[:1])
    yield _adam_by_threads(plan, THREADS)
    yield from (_trainer_job(plan, way, tokens) for tokens in size.tokens for way in TRAINER_WAYS)
    yield _sanitized(plan)
    if not plan.toy:  # the memory of a CPU is not capped
        yield from _train_jobs(plan, _FIVE, size.tokens, capped=True)
    yield from (_race(plan, *variant, seeds=20, note=", more seeds") for variant in RACES)
    yield from (_race(plan, *variant, ranks=2, note=", 2 ranks") for variant in RACES[:2])
    yield from _train_jobs(plan, tuple(CONTESTANTS), size.tokens)


def _superchip(plan: Plan) -> Iterator[Job]:
    """Yields the machine's limits, the CPU step on every number of cores, and the published evaluation's setting:
    the smallest model on one GPU first, ours before the others."""
    yield from _machine_jobs(plan)
    yield _adam_by_threads(plan, range(1, len(allowed_cpus()) + 1))
    gpus = torch.cuda.device_count() if plan.cuda else max(plan.ranks or (1,))
    for hidden in published_sizes(plan.toy):
        for ranks in plan.ranks or [count for count in (1, 2, 4) if count <= gpus]:
            for name in plan.contestants or PUBLISHED:
                yield _published_job(plan, name, ranks, hidden, gpus)


# ---- trust -----------------------------------------------------------------------------------------------------------


def _smoke(plan: Plan) -> Job:
    """Returns smoke, which all other jobs wait for."""
    values = {"device_name": plan.device}
    return Job(SMOKE, "smoke", values, sources=_OUR_SOURCES, keeps_output=True, prepares=True)


def _sanitized(plan: Plan) -> Job:
    """Returns smoke under NVIDIA's memory checker, which ends with 99 after it found an error."""
    places = [shutil.which("compute-sanitizer"), *map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))]
    program = next(filter(None, places), None)
    absent = "needs a GPU" if not plan.cuda else None if program else "compute-sanitizer is not installed"
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all", "--error-exitcode", "99"]
    return Job(
        SANITIZED, "smoke", {"device_name": plan.device}, 140.0, 140.0, absent, _OUR_SOURCES, (SMOKE,),
        keeps_output=True, starts=(program or "", *options, sys.executable),
    )  # fmt: skip


def _tests(plan: Plan) -> Job:
    """Returns the tests' job, for that folder only: one that cannot be collected would end them all."""
    options = ("-m", "gpu") if plan.cuda else ("-m", "not gpu", "-k", _TESTS_WITHOUT_A_GPU)
    words = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-v", "--no-header", "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None:  # replaces a worker that hangs or dies and goes on with the next tests
        words += ["-n", "1", "--max-worker-restart", "8"]
    if find_spec("pytest_timeout") is not None:
        words += ["--timeout", str(_SECONDS_PER_TEST), "--timeout-method", "thread"]
    # Before that, prints the stacks of all threads: what a worker prints as it dies is lost.
    words += ["-o", f"faulthandler_timeout={0.8 * _SECONDS_PER_TEST:g}", "-o", "faulthandler_exit_on_timeout=true"]
    return Job(
        TESTS, "tests", {"device": plan.device, "options": options}, 400.0, 200.0, None, _TEST_SOURCES, (SMOKE,),
        keeps_output=True, command=[*words, "--durations=0", *options],
    )  # fmt: skip


def _race(plan: Plan, speculation: str, delivery: str, *, seeds: int = 6, ranks: int = 1, note: str = "") -> Job:
    """Returns a race: alone, or as ranks that share the device."""
    values: dict[str, Any] = {"device": "cuda:0" if plan.device == "cuda" and ranks > 1 else plan.device}
    values |= {"speculation": speculation, "delivery": delivery, "seeds": list(range(2 if plan.toy else seeds))}
    absent = "needs a GPU" if ranks > 1 and plan.device == "stand-in" else None
    key = f"races, {speculation}, {delivery}{note}"
    return Job(key, "races", {**values, "ranks": ranks}, 150.0, 60.0, absent, _OUR_SOURCES, (SMOKE,))


# ---- the machine's own limits ----------------------------------------------------------------------------------------


def _machine_jobs(plan: Plan) -> Iterator[Job]:
    yield _machine_job("link", "link", {"device_name": plan.device, "numbytes": plan.size.copy_bytes})
    yield _machine_job("adam", "adam", dict(zip(("numel", "seconds"), plan.size.adam, strict=True)))


def _adam_by_threads(plan: Plan, threads: Sequence[int]) -> Job:
    numel, seconds = plan.size.adam
    return _machine_job("adam, by threads", "adam", {"numel": numel, "seconds": seconds, "threads": list(threads)})


def _machine_job(key: str, what: str, values: dict[str, Any]) -> Job:
    return Job(key, what, values, 90.0, 45.0, None, _OUR_SOURCES, (SMOKE,))


# ---- training --------------------------------------------------------------------------------------------------------


def _deepspeed_kernel(plan: Plan) -> Job:
    absent = CONTESTANTS[ZERO_OFFLOAD].absent(plan.device)
    return Job(DEEPSPEED_KERNEL, "deepspeed kernel", {}, 240.0, 120.0, absent, _PEER_SOURCES, (SMOKE,), prepares=True)


def _train_jobs(
    plan: Plan, contestants: Sequence[str], tokens: Sequence[int], *, capped: bool = False
) -> Iterator[Job]:
    for count in tokens:
        for name in contestants:
            row = train_row(name, plan.device, plan.size, count, capped=capped)
            yield _contestant_job(f"{count} tokens{', capped' if capped else ''}, {name}", "train", row)


def _contestant_job(
    key: str, what: str, row: TrainRow, seconds: float = 120.0, needs: float = 60.0, **more: Any
) -> Job:
    entry = CONTESTANTS[row.contestant]
    after = (SMOKE, DEEPSPEED_KERNEL) if entry.package == "deepspeed" else (SMOKE,)
    sources = _OUR_SOURCES if entry.kind == "ours" else _PEER_SOURCES
    more["absent"] = entry.absent(row.device) or more.get("absent")
    return Job(key, what, row.as_json(), seconds, needs, sources=sources, after=after, **more)


def _trainer_job(plan: Plan, way: str, tokens: int) -> Job:
    """Returns Hugging Face Trainer with every step's tokens in micro-batches."""
    row = train_row(way, plan.device, plan.size, tokens, micro_batches=_TRAINER_MICRO_BATCHES)
    absent = None if find_spec("transformers") else "transformers is not installed"
    key = f"{row.tokens} tokens, Trainer, {way}"
    return Job(key, "trainer", row.as_json(), 120.0, 60.0, absent, _OUR_SOURCES, (SMOKE,))


def _published_job(plan: Plan, name: str, ranks: int, hidden: int, gpus: int) -> Job:
    row = published_row(name, plan.device, ranks, hidden, plan.toy)
    missing = f"needs {ranks} GPUs, and there are {gpus}" if ranks > gpus else None
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    seconds, needs = (120.0, 0.0) if plan.toy else (5400.0, 600.0)
    key = f"hidden {hidden}, ranks: {ranks}, {name}"
    return _contestant_job(key, "published", row, seconds, needs, absent=missing, starts=(sys.executable, *launcher))
