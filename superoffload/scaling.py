"""Step time and verdict cost on N ranks, on paper: buckets through an emulated link, and a cost model of collectives.

Nothing here was measured on several GPUs; docs/scaling.md has every assumption with its source. `python -m
superoffload.scaling` prints its table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields

from superoffload.plan.profiles import GH200_96
from superoffload.plan.step_time import JOURNALED_BYTES, REPLAY_BYTES

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Machine:
    """One GH200 per rank: bytes per second, seconds, operations per second."""

    memory: float = GH200_96.host_bandwidth  # of the CPU, while the link moves
    link_down: float = GH200_96.link_down
    link_up: float = GH200_96.link_up
    compute: float = 400e12
    per_node: int = GH200_96.gpus_per_node
    intra_node: float = GH200_96.collectives  # what a ring carries between the GPUs of a node
    network: float = 25e9  # per GPU; all GPUs of a node send at once
    gpu_latency: float = 10e-6  # of one step of a collective of GPUs
    host_latency: float = 30e-6  # of one message between hosts, gloo over TCP
    host_bandwidth: float = 2.5e9


@dataclass(frozen=True)
class Model:
    """``tokens`` per rank and step: weak scaling. ``buckets`` per rank."""

    parameters: float = 8e9
    tokens: int = 8192
    layers: int = 32
    buckets: int = 32


@dataclass(frozen=True)
class Row:
    """Seconds. ``verdict``: the exchange alone; ``exposed``: what the optimizer adds after the end of backward."""

    ranks: int
    compute: float
    collectives: float
    optimizer: float
    exposed: float
    verdict: float
    verdict_exposed: float
    step: float
    clipped_step: float


@dataclass(frozen=True)
class Tail:
    """Seconds after the end of backward: the last gradient is in host memory, the last bucket is stepped."""

    arrived: float
    stepped: float


def ring(machine: Machine, ranks: int, total_bytes: float) -> float:
    """An all-gather or a reduce-scatter of ``total_bytes`` in all: n - 1 steps, paced by the slowest connection."""
    if ranks == 1:
        return 0.0
    bandwidth = machine.intra_node
    if ranks > machine.per_node:
        bandwidth = min(bandwidth, machine.per_node * machine.network)
    return (ranks - 1) * machine.gpu_latency + total_bytes * (ranks - 1) / ranks / bandwidth


def verdict_seconds(machine: Machine, ranks: int, payload: int = 128) -> float:
    """gloo's all-gather of small messages is a ring: one message after the other around all ranks."""
    return (ranks - 1) * (machine.host_latency + payload / machine.host_bandwidth)


def simulate(machine: Machine, model: Model, ranks: int) -> Row:
    """One step. Buckets arrive one after the other during backward; link and worker threads are queues of their own."""
    shard = model.parameters / ranks
    forward = 2 * model.parameters * model.tokens / machine.compute
    gather = ring(machine, ranks, 2 * model.parameters)
    reduce = ring(machine, ranks, 4 * model.parameters)  # in fp32
    # Parameters are gathered twice and gradients reduced once, each hidden behind the compute of the layers around it
    # but for the first gather and the last reduction.
    forward_time = max(forward, gather) + gather / model.layers
    backward = max(2 * forward, gather + reduce) + reduce / model.layers
    tail = tail_of(machine, model, shard, backward)
    verdict = verdict_seconds(machine, ranks)
    up = 2 * shard / machine.link_up
    # The exchange starts when the last gradient is there, and nothing is delivered or replayed before it ends.
    decided = max(tail.stepped, tail.arrived + verdict)
    replay = REPLAY_BYTES * shard / machine.memory + up / model.buckets
    return Row(
        ranks,
        compute=3 * forward,
        collectives=2 * gather + reduce,
        optimizer=JOURNALED_BYTES * shard / machine.memory,
        exposed=decided + up,
        verdict=verdict,
        verdict_exposed=decided - tail.stepped,
        step=forward_time + backward + decided + up,
        clipped_step=forward_time + backward + decided + replay,
    )


def tail_of(machine: Machine, model: Model, shard: float, backward: float) -> Tail:
    """Sends the buckets of one rank down the link and through the worker threads."""
    per_bucket = shard / model.buckets
    arrived = stepped = 0.0
    for bucket in range(model.buckets):
        final = backward * (bucket + 1) / model.buckets
        arrived = max(final, arrived) + 2 * per_bucket / machine.link_down
        stepped = max(arrived, stepped) + JOURNALED_BYTES * per_bucket / machine.memory
    return Tail(arrived - backward, stepped - backward)


def table(machine: Machine, model: Model, ranks: Sequence[int] = RANKS) -> str:
    """As docs/scaling.md has it; milliseconds."""
    lines = [
        "| ranks | compute | collectives | optimizer | exposed | step | clipped step | verdict | exposed of it |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for count in ranks:
        row = simulate(machine, model, count)
        seconds = (row.compute, row.collectives, row.optimizer, row.exposed, row.step, row.clipped_step)
        cells = " | ".join(f"{1e3 * value:.1f}" for value in seconds)
        share = row.verdict_exposed / row.step
        lines.append(f"| {count} | {cells} | {1e3 * row.verdict:.2f} | {share:.2%} of the step |")
    return "\n".join(lines)


def fewest_ranks_where_the_verdict_shows(machine: Machine, model: Model) -> int:
    """The first power of two at which the exchange outlasts the step of the last bucket; 0 if none up to 2 ** 20."""
    counts = (2**exponent for exponent in range(21))
    return next((count for count in counts if simulate(machine, model, count).verdict_exposed > 0.0), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in (*fields(Model), *fields(Machine)):
        kind = float if isinstance(field.default, float) else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    values = vars(parser.parse_args())
    model = Model(**{field.name: values[field.name] for field in fields(Model)})
    machine = Machine(**{field.name: values[field.name] for field in fields(Machine)})
    print("Milliseconds:")
    print(table(machine, model))
    count = fewest_ranks_where_the_verdict_shows(machine, model)
    print(
        f"The verdict is hidden behind the step of the last bucket below {count} ranks." if count else "It is hidden."
    )


if __name__ == "__main__":
    main()
