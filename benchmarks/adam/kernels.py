"""Times every operation of every instruction set against the machine's own limit, torch's fused AdamW and others.

Everything in one table is interleaved (timing.py): a walk over the same bytes for every operation, our kernels with one
setting of masters and moments or several, each on arrays of its own, and peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.adam.peers import PEERS, Peer
from benchmarks.bandwidth.limit import MemoryLimit
from benchmarks.timing import Contestant, Rounds, Samples, interleave, timed
from benchmarks.training.config import STATE_SETTINGS
from benchmarks.workload import BETAS, BYTES_PER_PARAM, EPS, LR, WEIGHT_DECAY, Workload
from superoffload import _native, kernels
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.host.processors import allowed_cpus
from superoffload.host.system import System, usable_memory
from superoffload.optimizer.arguments import check_state_dtype

Operation = _native.Operation
Row = dict[str, Any]

# name of the row: operation for the memory limit, bytes per code
OPERATIONS = {
    "step": ("step", 1),
    "journaled": ("journaled", 1),
    "journaled, 2-byte codes": ("journaled", 2),
    "undo": ("undo", 1),
    "replay": ("replay", 1),
    "publish": ("publish", 1),
}
READING = "publish, reading alone"  # has a limit only
STEP, JOB = "{} step", "{}, same job"
TORCH, DEEPSPEED = "torch fused", "DeepSpeedCPUAdam"
DEFAULT = "fp32"  # of STATE_SETTINGS
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


def check_memory(numel: int, bytes_per_param: float = BYTES_PER_PARAM) -> None:
    """Raises if arrays of `numel` elements would not fit into memory."""
    needed, available = numel * bytes_per_param, usable_memory(System())
    if available is not None and needed > 0.8 * available:
        raise ArgumentError(
            f"{numel} elements take {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free; choose fewer"
        )


def measure(
    numel: int, threads: int, isas: Sequence[str], seconds: float, *, forms: Sequence[str] = (DEFAULT,),
    peers: Sequence[str] = (), deepspeed: Any = None, only: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """Times one size and number of threads; ``only``: these operations, and no peers.

    With one of ``forms`` the peers are torch's fused AdamW and DeepSpeed's, and a ratio is to the plain step; with
    several it is to the same operation of the first, the default, and ``peers`` are some of PEERS.
    """
    cpus = allowed_cpus()[:threads]
    before, torch_threads = kernels.current_isa(), torch.get_num_threads()
    torch.set_num_threads(threads)
    kernels.set_isa(isas[-1])
    pool = _native.WorkerPool(cpus)
    ways: dict[str, Any] = {}
    try:
        contestants: list[Contestant] = []
        for form in forms:
            moments, masters = STATE_SETTINGS[form]
            workload = Workload(numel, pool, check_state_dtype(moments), split=masters == "split")
            for row, operation in {**OPERATIONS, READING: ("reading", 1)}.items():
                if only and row not in only:
                    continue
                limit = MemoryLimit(*operation, workload, cpus)
                ways[f"{form}: {limit_name(row)}"] = limit.way._asdict()
                moved = limit.bytes_per_param
                contestants.append(Contestant(f"{form}: {limit_name(row)}", "", moved, limit.seconds))
                for isa in isas if row in OPERATIONS else ():
                    call = _with_isa(_calls(workload, pool)[row], isa)
                    contestants.append(Contestant(f"{form}: {row}", isa, moved, call))
        if len(forms) == 1 and not only:
            contestants += _over(workload, TORCH, torch.optim.AdamW, torch.tensor(float(workload.step)), fused=True)
            if deepspeed is not None:
                contestants += _over(workload, DEEPSPEED, deepspeed, workload.step, adamw_mode=True)
        contestants += [_lean_step(name, PEERS[name], numel) for name in peers]
        samples = interleave(contestants, Rounds(5, 200, seconds))
    finally:
        pool.close()
        kernels.set_isa(before)
        torch.set_num_threads(torch_threads)
    rows = (_row(one, samples, isas[-1], len(forms) > 1) for one in samples.values())
    shared = {"threads": threads, "numel": numel}
    return [
        {**row, **shared, "gb_per_s": row["bytes_per_param"] * numel / row["seconds_median"] / 1e9}
        | ({"way": way} if (way := ways.get(f"{row['state']}: {row['name']}")) else {})
        for row in rows
    ]


def _row(one: Samples, samples: dict[tuple[str, str], Samples], best_isa: str, compares_forms: bool) -> Row:
    state, _, name = one.contestant.name.partition(": ")
    limit = samples.get((f"{state}: {limit_name(name)}", ""))
    if compares_forms:
        base = samples[f"{DEFAULT}: {name}", "" if name.startswith(limit_name("")) else best_isa]
    else:  # a peer's ratio is to our step with the best instruction set; ours to the same set's plain step
        base = samples[f"{DEFAULT}: step", one.contestant.isa or best_isa]
    return {
        "name": name,
        "state": state,
        "isa": one.contestant.isa,
        "seconds_median": one.median,
        "seconds_min": one.minimum,
        "samples": len(one.seconds),
        "bytes_per_param": one.contestant.bytes_per_param,
        "of_limit": limit.ratio_to(one) if limit is not None else None,
        "ratio_to": f"{base.contestant.name} {base.contestant.isa}".strip(),
        "ratio": one.ratio_to(base),
    }


# ---- contestants ----------------------------------------------------------------------------------------------------


def limit_name(row: str) -> str:
    return f"limit of {row}"


def _calls(workload: Workload, pool: _native.WorkerPool) -> dict[str, Callable[[int], float]]:
    """Returns our operations, driven through the worker pool as the optimizer does."""

    def step() -> None:
        pool.submit(workload.next_work(), Operation.step).wait()

    def journaled(width: int = 1) -> None:
        work = workload.next_work()
        pool.submit(work, Operation.step_journaled, width).wait()
        if work.overflowed:
            raise SuperOffloadError(
                f"the journal of the benchmark's arrays overflowed (codes of {width} bytes): their gradients are not "
                "what training gives; this is a bug of the benchmark, please report it"
            )

    def undo() -> None:
        pool.submit(workload.current_work, Operation.undo).wait()
        workload.take_back()

    def replay() -> None:
        workload.freeze(gradient_factor=0.5)
        pool.submit(workload.current_work, Operation.replay).wait()

    def publish() -> None:
        pool.submit(workload.next_work(), Operation.publish).wait()

    def settle() -> None:
        pool.submit(workload.current_work, Operation.settle).wait()

    return {
        "step": timed(step),
        "journaled": timed(journaled),
        "journaled, 2-byte codes": timed(lambda: journaled(2)),
        "undo": timed(undo, prepare=journaled),
        "replay": timed(replay, prepare=journaled),
        "publish": timed(publish, finish=settle if workload.split else workload.take_back),
    }


def _with_isa(call: Callable[[int], float], isa: str) -> Callable[[int], float]:
    def seconds(repeats: int) -> float:
        kernels.set_isa(isa)
        return call(repeats)

    return seconds


def _over(workload: Workload, name: str, optimizer_class: Any, step: Any, **options: Any) -> Iterator[Contestant]:
    """Lays another library's optimizer over the workload's memory; ``step``: its step count, in its own form.

    The same job is from a bf16 gradient to a bf16 parameter, the bare step from an fp32 gradient to the master.
    """
    parameter = nn.Parameter(workload.master)
    parameter.grad = gradient = workload.gradient.float()
    optimizer = optimizer_class([parameter], **OPTIONS, **options)
    optimizer.state[parameter] = {"step": step, "exp_avg": workload.exp_avg, "exp_avg_sq": workload.exp_avg_sq}

    def same_job() -> None:
        gradient.copy_(workload.gradient)
        optimizer.step()
        workload.shadow.copy_(workload.master)

    for what, call in ((STEP, optimizer.step), (JOB, same_job)):
        yield Contestant(f": {what.format(name)}", "", 28.0, timed(call), settles=True)


def _lean_step(name: str, peer: Peer, numel: int) -> Contestant:
    """Times a step over fp32 parameters with fp32 gradients."""
    random = torch.Generator().manual_seed(0)
    param = nn.Parameter(0.02 * torch.randn(numel, generator=random))
    param.grad = 1e-3 * torch.randn(numel, generator=random)
    optimizer = peer.optimizer([param], **OPTIONS)
    moved = 3 * param.element_size() + 2 * peer.bytes_per_param
    return Contestant(f"{name}: step", "", moved, timed(optimizer.step), settles=True)
