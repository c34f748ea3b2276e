"""Lists all measurements, the most telling first; each is one process.

A slot may end after any call. So the first one measures the machine's limits and ours behind smoke alone; the GPU
tests, races and peers follow in the second, and what explains the figures in the third.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.gpu_suite.settings import Size, published_row, published_sizes, train_row
from benchmarks.gpu_suite.smoke import sanitizer
from benchmarks.jobs import RESULT_PATH, Job
from benchmarks.sources import PACKAGE
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
_PEER_SOURCES = (
    *_suite_files(
        "child", "contestants", "deepspeed_contestants", "devices", "fsdp2_contestants", "settings", "training"
    ),
    "benchmarks/training",
)
_OUR_SOURCES = (
    *PACKAGE,
    *_PEER_SOURCES,
    "benchmarks/bandwidth",
    *_suite_files("given_gradients", "launches", "machine_rows", "pack_kernel", "races", "smoke"),
)
_TEST_SOURCES = (
    *_OUR_SOURCES,
    *("tests/gpu", "tests/conftest.py", "tests/support/reference", "tests/support/kernel_battery.json"),
    *(
        f"tests/convergence/{name}.py"
        for name in ("engines", "local_ranks", "meshes", "mixture", "setup", "tensor_parallel")
    ),
    *(
        f"tests/support/{name}.py"
        for name in (
            "checkout",
            "device_battery",
            "guarded_arrays",
            "kernel_battery",
            "kernel_inputs",
            "numpy_kernels",
            "rank_processes",
        )
    ),
)
# Two processes for torch's other allocators, a compiled model and four exits take the most; the rest is about a second
# each. The job does not begin if a call has too little time left for most of it.
_TESTS_SECONDS, _TESTS_NEED = 400.0, 200.0
_TESTS_WITHOUT_A_GPU = "gets_the_gradients or kept_gradients"  # two of those that `make test` runs
_DEVICE_SECONDS = 45.0  # after which our link gives a device up: before any job's own time is over


@dataclass(frozen=True)
class Plan:
    """Holds what the command line asks for."""

    device: str
    size: Size
    toy: bool = False
    slot: str = "first"
    contestants: tuple[str, ...] | None = None  # instead of the slot's
    tokens: tuple[int, ...] | None = None  # likewise
    capped: bool = False  # of these rows
    ranks: tuple[int, ...] | None = None  # of the superchip slot; None: 1, 2 and 4, as many as there are GPUs
    row_seconds: float = 120.0
    sanitized: bool = True
    tests: bool = True

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


def all_jobs(plan: Plan) -> list[Job]:
    if (plan.contestants or plan.tokens) and plan.slot != "superchip":
        chosen = plan.contestants or _FIVE, plan.tokens or plan.size.tokens[:1]
        jobs = list(_train_jobs(plan, *chosen, capped=plan.capped))
    else:
        jobs = {"first": _first, "second": _second, "third": _third, "superchip": _superchip}[plan.slot](plan)
    jobs = _once([*smoke_jobs(plan.device, sanitized=False), *jobs])
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
        *([_tests(plan)] if plan.tests else []),
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
        _streamed_state(plan),
        *(_trainer_job(plan, way, tokens) for tokens in size.tokens for way in TRAINER_WAYS),
        *smoke_jobs(plan.device, sanitized=plan.sanitized),
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


def _once(jobs: Sequence[Job]) -> list[Job]:
    return list({job.key: job for job in jobs}.values())


def tests_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_suite.gpu_tests", *options]


def child(what: str, values: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_suite.child", what, json.dumps(values), RESULT_PATH]


def _own_program(name: str, values: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu_suite.{name}", json.dumps(values), RESULT_PATH]


# ---- trust -----------------------------------------------------------------------------------------------------------


def smoke_jobs(device: str, *, sanitized: bool = True) -> Iterator[Job]:
    """Yields smoke, which all other jobs wait for, and the same under compute-sanitizer where that is installed."""
    values: dict[str, Any] = {"device_name": device}
    common: dict[str, Any] = {"environment": _environment(), "sources": _OUR_SOURCES, "prepares": True}
    settings = {"what": "smoke", **values}
    yield Job(SMOKE, child("smoke", values), settings, 180.0, keeps_output=True, needs=60.0, **common)
    if sanitized and device.startswith("cuda") and sanitizer() is not None:
        within: dict[str, Any] = {**values, "seconds": 120.0}
        settings = {"what": "smoke", **within}
        common["prepares"] = False
        yield Job(SANITIZED, child("sanitized", within), settings, 140.0, keeps_output=True, after=(SMOKE,), **common)


def _environment() -> dict[str, str]:
    return {DEVICE_TIMEOUT: f"{_DEVICE_SECONDS:g}"}


def _tests(plan: Plan) -> Job:
    """Returns the tests' job; with pytest-xdist they have a worker process: one that hangs or dies costs no other."""
    options = ("-m", "gpu") if plan.cuda else ("-m", "not gpu", "-k", _TESTS_WITHOUT_A_GPU)
    command = tests_command(*options)
    settings = {"what": "tests", "device": plan.device, "options": options}
    return Job(
        TESTS, command, settings, _TESTS_SECONDS, _environment(), keeps_output=True, sources=_TEST_SOURCES,
        needs=_TESTS_NEED, after=(SMOKE,),
    )  # fmt: skip


# ---- the machine's own limits ----------------------------------------------------------------------------------------


def _machine_jobs(plan: Plan) -> list[Job]:
    size = plan.size
    copies = {"device_name": plan.device, "numbytes": size.copy_bytes}
    adam = {"numel": size.adam_numel, "seconds": size.adam_seconds, "with_deepspeed": False}
    return [
        _machine_job(plan, "link", "link", copies),
        _machine_job(plan, "adam", "adam", adam),
        _machine_job(plan, "pack", "pack", copies),
    ]


def _adam_by_threads(plan: Plan, threads: Sequence[int] = THREADS) -> Job:
    size = plan.size
    values = {"numel": size.adam_numel, "seconds": size.adam_seconds, "with_deepspeed": False}
    return _machine_job(plan, "adam, by threads", "adam", {**values, "threads": list(threads)})


def _streamed_state(plan: Plan) -> Job:
    size = plan.size
    values = {"device_name": plan.device, "numel": 2 * size.adam_numel, "chunk": size.adam_numel // 16}
    values |= {"seconds": size.adam_seconds / 4, "threads": list(THREADS)}
    return Job(
        "state in chunks on the device", _own_program("streamed_state", values), {"what": "streamed state", **values},
        90.0, sources=(*_OUR_SOURCES, *_suite_files("streamed_state")), needs=45.0, after=(SMOKE,),
    )  # fmt: skip


def _machine_job(plan: Plan, key: str, what: str, values: dict[str, Any]) -> Job:
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
    entry = CONTESTANTS[name]
    values = train_row(name, plan.device, plan.size, tokens, capped).as_json()
    compiled = (DEEPSPEED_KERNEL,) if entry.package == "deepspeed" else ()
    return Job(
        f"{tokens} tokens{', capped' if capped else ''}, {name}",
        child("train", values),
        {"what": "train", **values},
        plan.row_seconds,
        _environment(),
        entry.absent(plan.device),
        sources=_OUR_SOURCES if entry.kind == "ours" else _PEER_SOURCES,
        needs=plan.row_seconds / 2,
        after=(SMOKE, *compiled),
    )


def _trainer_job(plan: Plan, way: str, tokens: int) -> Job:
    """Returns Hugging Face Trainer with every step's tokens in micro-batches."""
    row = train_row(way, plan.device, plan.size, tokens, capped=False)
    count = TRAINER_MICRO_BATCHES
    batch = tokens // (count * row.model.sequence) or 1
    values = {"way": way, "device": plan.device, "model": asdict(row.model), "micro_batches": count, "batch": batch}
    values |= {"warm_up": row.warm_up, "blocks": row.blocks, "steps": row.steps}
    values["tokens"] = count * batch * row.model.sequence
    absent = None if find_spec("transformers") else "transformers is not installed"
    return Job(
        f"{values['tokens']} tokens, Trainer, {way}", _own_program("trainer_rows", values),
        {"what": "trainer", **values}, plan.row_seconds, _environment(), absent,
        sources=(*_OUR_SOURCES, *_suite_files("trainer_rows")), needs=plan.row_seconds / 2, after=(SMOKE,),
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
    entry, values = CONTESTANTS[name], published_row(name, plan.device, ranks, hidden, plan.toy).as_json()
    command = child("train", values)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    absent = entry.absent(plan.device) or (f"needs {ranks} GPUs, and there are {gpus}" if ranks > gpus else None)
    return Job(
        f"hidden {hidden}, ranks: {ranks}, {name}",
        [sys.executable, *launcher, *command[1:]],
        {"what": "published", **values},
        plan.row_seconds if plan.toy else _PUBLISHED_SECONDS,
        _environment(),
        absent,
        sources=_OUR_SOURCES if entry.kind == "ours" else _PEER_SOURCES,
        needs=0.0 if plan.toy else _PUBLISHED_NEED,
        after=(SMOKE, *((DEEPSPEED_KERNEL,) if entry.package == "deepspeed" else ())),
    )


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
