"""Lists all measurements, the most telling first; each is one process.

A slot may end after any call. So the first one measures the machine's limits and ours behind smoke alone; the GPU
tests, races and peers follow in the second, and what explains the figures in the third.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
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
    SUPEROFFLOAD,
    THREADS,
    TORCHAO,
    ZERO3_OFFLOAD,
    ZERO_OFFLOAD,
)
from benchmarks.gpu_suite.jobs import RESULT_PATH, Job
from benchmarks.gpu_suite.settings import FULL, TOY, Size, TrainRow, published_row, published_sizes, train_row
from benchmarks.gpu_suite.smoke import sanitizer
from benchmarks.report import PACKAGE, ROOT
from superoffload.host.environment import DEVICE_TIMEOUT
from superoffload.host.processors import allowed_cpus

SMOKE, SANITIZED, TESTS, DEEPSPEED_KERNEL = "smoke", "smoke, compute-sanitizer", "tests", "DeepSpeed's kernel"

# Hugging Face Trainer: without an optimizer's work; the same job as ours, on the device; ours.
TRAINER_WAYS = ("sgd without state", "adamw_torch_fused, fp32 parameters", "ours")
TRAINER_MICRO_BATCHES = 4

# Each is compared with a synchronous, eager run without delays.
RACES = (("always", "eager"), ("always", "on_demand"), ("adaptive", "eager"), ("never", "eager"))
_RACES_OF_SECOND = 2
_SEEDS, _MORE_SEEDS, _TOY_SEEDS = tuple(range(6)), tuple(range(20)), (0, 1)


def _suite_files(*names: str) -> tuple[str, ...]:
    return tuple(f"benchmarks/gpu_suite/{name}.py" for name in names)


# A row's sources decide when it is measured again. A peer's stays when our optimizer changes.
_PEER_SOURCES = (*_suite_files("child", "contestants", "devices", "settings", "training"), "benchmarks/training")
_OUR_SOURCES = (
    *PACKAGE, *_PEER_SOURCES, "benchmarks/bandwidth",
    *_suite_files("given_gradients", "machine_rows", "races", "smoke"),
)  # fmt: skip
_OF_TESTS = (
    "convergence/engines convergence/local_ranks convergence/meshes convergence/mixture convergence/setup "
    "support/checkout support/device_battery support/guarded_arrays support/kernel_battery "
    "support/kernel_inputs support/numpy_kernels support/rank_processes conftest"
)
_TEST_SOURCES = (
    *_OUR_SOURCES, "tests/gpu", "tests/support/reference", "tests/support/kernel_battery.json",
    *(f"tests/{name}.py" for name in _OF_TESTS.split()),
)  # fmt: skip
# Two processes for torch's other allocators, a compiled model and four exits take the most; the rest is about a second
# each. The job does not begin if a call has too little time left for most of it.
_TESTS_SECONDS, _TESTS_NEED, _SECONDS_PER_TEST = 400.0, 200.0, 60
_ROW_SECONDS = 120.0
_TESTS_WITHOUT_A_GPU = "gets_the_gradients or kept_gradients"  # two of those that `make test` runs
_DEVICE_SECONDS = 45.0  # after which our link gives a device up: before any job's own time is over


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
        jobs = list(_train_jobs(plan, *chosen, capped=plan.capped))
    else:
        jobs = {"first": _first, "second": _second, "third": _third, "superchip": _superchip}[plan.slot](plan)
    jobs = list({job.key: job for job in [_smoke(plan), *jobs]}.values())
    waiting = [place for place, job in enumerate(jobs) if DEEPSPEED_KERNEL in job.after]
    if waiting:
        jobs.insert(waiting[0], _deepspeed_kernel(plan))
    return jobs


_FIVE = (BARE, ALL_ON_DEVICE, OURS, OURS_CLIPPED, SUPEROFFLOAD)
_OURS = tuple(name for name, entry in CONTESTANTS.items() if entry.kind == "ours")
_PEERS = tuple(name for name, entry in CONTESTANTS.items() if entry.kind == "peer")


def _first(plan: Plan) -> list[Job]:
    """Returns the machine's limits and the headline, with fp32 state and with fewer bytes."""
    contestants = (ALL_ON_DEVICE, OURS, OURS_CLIPPED, OURS_BF16, OURS_LEAN)
    return [*_machine_jobs(plan), *_train_jobs(plan, contestants, plan.size.tokens)]


def _second(plan: Plan) -> list[Job]:
    """Returns the GPU tests, races, and the peers at the headline's tokens."""
    tokens = plan.size.tokens
    return [
        _tests(plan),
        *(_race(plan, *variant) for variant in RACES[:_RACES_OF_SECOND]),
        *_machine_jobs(plan),
        *_train_jobs(plan, (ALL_ON_DEVICE, OURS, *_PEERS), tokens[:1]),
        *_train_jobs(plan, (SUPEROFFLOAD, TORCHAO, ZERO_OFFLOAD), tokens[1:]),
    ]


def _third(plan: Plan) -> list[Job]:
    """Returns what ours depends on, then compute-sanitizer, capped memory, a sweep over tokens, all races, the rest."""
    size = plan.size
    return [
        *_train_jobs(plan, _OURS, size.tokens[:1]),
        _adam_by_threads(plan),
        *(_trainer_job(plan, way, tokens) for tokens in size.tokens for way in TRAINER_WAYS),
        _sanitized(plan),
        *_train_jobs(plan, _FIVE, size.capped_tokens, capped=True),
        *(_race(plan, *variant, more=True) for variant in RACES),
        *(_race(plan, *variant, ranks=2) for variant in RACES[:2]),
        *(_race(plan, *variant, sanitizer=True) for variant in RACES),
        *_train_jobs(plan, _FIVE, size.more_tokens),
        *_train_jobs(plan, tuple(CONTESTANTS), size.tokens),
        *_train_jobs(plan, (TORCHAO, ZERO_OFFLOAD), size.capped_tokens, capped=True),
    ]


def _superchip(plan: Plan) -> list[Job]:
    """Returns the machine's limits, the CPU step on every number of cores, and the published evaluation's setting."""
    cores = range(1, len(allowed_cpus()) + 1)
    return [*_machine_jobs(plan), _adam_by_threads(plan, cores), *_published_jobs(plan)]


def child(what: str, values: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_suite.child", what, json.dumps(values), RESULT_PATH]


# ---- trust -----------------------------------------------------------------------------------------------------------


def _smoke(plan: Plan) -> Job:
    """Returns smoke, which all other jobs wait for."""
    values = {"device_name": plan.device}
    return Job(
        SMOKE, child("smoke", values), {"what": "smoke", **values}, 180.0, _environment(), keeps_output=True,
        sources=_OUR_SOURCES, needs=60.0, prepares=True,
    )  # fmt: skip


def _sanitized(plan: Plan) -> Job:
    """Returns smoke under compute-sanitizer."""
    values: dict[str, Any] = {"device_name": plan.device, "seconds": 120.0}
    absent = None if plan.cuda else "needs a GPU"
    if plan.cuda and sanitizer() is None:
        absent = "compute-sanitizer is not installed"
    return Job(
        SANITIZED, child("sanitized", values), {"what": "smoke", **values}, 140.0, _environment(), absent,
        keeps_output=True, sources=_OUR_SOURCES, after=(SMOKE,),
    )  # fmt: skip


def _environment() -> dict[str, str]:
    return {DEVICE_TIMEOUT: f"{_DEVICE_SECONDS:g}"}


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
        TESTS, [*words, "--durations=0", *options], {"what": "tests", "device": plan.device, "options": options},
        _TESTS_SECONDS, _environment(), keeps_output=True, sources=_TEST_SOURCES, needs=_TESTS_NEED, after=(SMOKE,),
    )  # fmt: skip


# ---- the machine's own limits ----------------------------------------------------------------------------------------


def _machine_jobs(plan: Plan) -> list[Job]:
    copies = {"device_name": plan.device, "numbytes": plan.size.copy_bytes}
    return [_machine_job("link", "link", copies), _machine_job("adam", "adam", _adam(plan))]


def _adam(plan: Plan) -> dict[str, Any]:
    return {"numel": plan.size.adam_numel, "seconds": plan.size.adam_seconds}


def _adam_by_threads(plan: Plan, threads: Sequence[int] = THREADS) -> Job:
    return _machine_job("adam, by threads", "adam", {**_adam(plan), "threads": list(threads)})


def _machine_job(key: str, what: str, values: dict[str, Any]) -> Job:
    return Job(
        key, child(what, values), {"what": what, **values}, 90.0, sources=_OUR_SOURCES, needs=45.0, after=(SMOKE,)
    )


# ---- training --------------------------------------------------------------------------------------------------------


def _deepspeed_kernel(plan: Plan) -> Job:
    absent = CONTESTANTS[ZERO_OFFLOAD].absent(plan.device)
    return Job(
        DEEPSPEED_KERNEL, child("deepspeed kernel", {}), {"what": "deepspeed kernel"}, 240.0, absent=absent,
        sources=_PEER_SOURCES, needs=120.0, after=(SMOKE,), prepares=True,
    )  # fmt: skip


def _train_jobs(
    plan: Plan, contestants: Sequence[str], tokens: Sequence[int], *, capped: bool = False
) -> Iterator[Job]:
    for count in tokens:
        for name in contestants:
            yield _train_job(plan, name, count, capped=capped)


def _train_job(plan: Plan, name: str, tokens: int, *, capped: bool) -> Job:
    key = f"{tokens} tokens{', capped' if capped else ''}, {name}"
    return _contestant_job(key, "train", train_row(name, plan.device, plan.size, tokens, capped))


def _contestant_job(key: str, what: str, row: TrainRow, **more: Any) -> Job:
    entry, values = CONTESTANTS[row.contestant], row.as_json()
    compiled = (DEEPSPEED_KERNEL,) if entry.package == "deepspeed" else ()
    common: dict[str, Any] = {
        "seconds": _ROW_SECONDS,
        "environment": _environment(),
        "absent": entry.absent(row.device),
        "sources": _OUR_SOURCES if entry.kind == "ours" else _PEER_SOURCES,
        "needs": _ROW_SECONDS / 2,
        "after": (SMOKE, *compiled),
    }
    return Job(key, child("train", values), {"what": what, **values}, **{**common, **more})


def _trainer_job(plan: Plan, way: str, tokens: int) -> Job:
    """Returns Hugging Face Trainer with every step's tokens in micro-batches."""
    row = train_row(way, plan.device, plan.size, tokens, capped=False)
    batch = tokens // (TRAINER_MICRO_BATCHES * row.model.sequence) or 1
    row = replace(row, micro_batches=TRAINER_MICRO_BATCHES, batch=batch)
    values = row.as_json()
    return Job(
        f"{row.tokens} tokens, Trainer, {way}", child("trainer", values), {"what": "trainer", **values}, _ROW_SECONDS,
        _environment(), None if find_spec("transformers") else "transformers is not installed",
        sources=(*_OUR_SOURCES, *_suite_files("trainer_rows")), needs=_ROW_SECONDS / 2, after=(SMOKE,),
    )  # fmt: skip


PUBLISHED = (OURS_FSDP2, FSDP2_ON_DEVICE, SUPEROFFLOAD, ZERO3_OFFLOAD, FSDP2_OFFLOAD)
_PUBLISHED_SECONDS, _PUBLISHED_NEED = 5400.0, 600.0


def _published_jobs(plan: Plan) -> Iterator[Job]:
    """Yields the smallest model on one GPU first, ours before the others."""
    gpus = torch.cuda.device_count() if plan.cuda else max(plan.ranks or (1,))
    for hidden in published_sizes(plan.toy):
        for ranks in plan.ranks or [count for count in (1, 2, 4) if count <= gpus]:
            for name in plan.contestants or PUBLISHED:
                yield _published_job(plan, name, ranks, hidden, gpus)


def _published_job(plan: Plan, name: str, ranks: int, hidden: int, gpus: int) -> Job:
    job = _contestant_job(
        f"hidden {hidden}, ranks: {ranks}, {name}", "published",
        published_row(name, plan.device, ranks, hidden, plan.toy),
        **({"needs": 0.0} if plan.toy else {"seconds": _PUBLISHED_SECONDS, "needs": _PUBLISHED_NEED}),
    )  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    absent = job.absent or (f"needs {ranks} GPUs, and there are {gpus}" if ranks > gpus else None)
    return replace(job, command=[sys.executable, *launcher, *job.command[1:]], absent=absent)


def _race(
    plan: Plan, speculation: str, delivery: str, *, more: bool = False, ranks: int = 1, sanitizer: bool = False
) -> Job:
    """Returns a race: alone, as ranks that share the device, or under torch's own sanitizer of streams."""
    seeds = list(_TOY_SEEDS if plan.toy or sanitizer else _MORE_SEEDS if more else _SEEDS)
    device = "cuda:0" if plan.device == "cuda" and ranks > 1 else plan.device  # ranks share it
    values: dict[str, Any] = {"device": device, "speculation": speculation, "delivery": delivery}
    values |= {"seeds": seeds, "ranks": ranks}
    environment = {"TORCH_CUDA_SANITIZER": "1"} if sanitizer else {}
    absent = None
    if (sanitizer and not plan.cuda) or (ranks > 1 and plan.device == "stand-in"):
        absent = "needs a GPU"
    note = f", {ranks} ranks" if ranks > 1 else ", sanitizer" if sanitizer else ", more seeds" if more else ""
    return Job(
        f"races, {speculation}, {delivery}{note}",
        child("races", values),
        {"what": "races", **values, **environment},
        150.0,
        {**_environment(), **environment},
        absent,
        sources=_OUR_SOURCES,
        needs=60.0,
        after=(SMOKE,),
    )
