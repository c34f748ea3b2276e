"""Step time and verdict cost on N ranks, on paper: a bandwidth model of one GH200 per rank and a collective cost model.

Nothing here was measured on several GPUs; docs/scaling.md lists every assumption. `python -m superoffload.scaling`
prints its table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Machine:
    """Bytes per second, seconds and operations per second; the numbers of a GH200 and of its usual network."""

    memory: float = 420e9  # of the CPU, while the link moves
    link_down: float = 297e9
    link_up: float = 375e9
    compute: float = 400e12
    per_node: int = 4
    intra_node: float = 100e9  # of a ring step between GPUs of a node, per rank
    inter_node: float = 25e9  # likewise over the network
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
    """Seconds per step. ``verdict``: the exchange alone; ``exposed``: what the optimizer adds after backward."""

    ranks: int
    compute: float
    collectives: float
    optimizer: float
    exposed: float
    replay_exposed: float
    verdict: float
    step: float
    clipped_step: float
    gather_bytes: int

    @property
    def verdict_share(self) -> float:
        return self.verdict / self.step


def ring(machine: Machine, ranks: int, total_bytes: float) -> float:
    """An all-gather or a reduce-scatter of ``total_bytes`` in all: n - 1 steps, paced by the slowest connection."""
    if ranks == 1:
        return 0.0
    bandwidth = machine.intra_node if ranks <= machine.per_node else machine.inter_node
    return (ranks - 1) * machine.gpu_latency + total_bytes * (ranks - 1) / ranks / bandwidth


def verdict_seconds(machine: Machine, ranks: int, payload: int = 128) -> float:
    """gloo's all-gather of small messages is a ring: one message after the other around all ranks."""
    return (ranks - 1) * (machine.host_latency + payload / machine.host_bandwidth)


def simulate(machine: Machine, model: Model, ranks: int) -> Row:
    """One step: buckets arrive one after the other during backward; link and worker threads are queues of their own."""
    shard = model.parameters / ranks
    forward = 2 * model.parameters * model.tokens / machine.compute
    gather = ring(machine, ranks, 2 * model.parameters)
    reduce = ring(machine, ranks, 4 * model.parameters)  # in fp32
    # Parameters are gathered twice and gradients reduced once, each hidden behind the compute of the layers around it
    # but for the first gather and the last reduction.
    forward_time = max(forward, gather) + gather / model.layers
    backward = max(2 * forward, gather + reduce) + reduce / model.layers
    tail, optimizer = _tail(machine, model, shard, backward, 29.2)
    verdict = verdict_seconds(machine, ranks)
    up = 2 * shard / machine.link_up
    exposed = max(tail, verdict) + up
    replay = max(tail, verdict) + 30.4 * shard / machine.memory + up / model.buckets
    before = forward_time + backward
    return Row(
        ranks,
        3 * forward,
        2 * gather + reduce,
        optimizer,
        exposed,
        replay,
        verdict,
        before + exposed,
        before + replay,
        128 * ranks,
    )


def _tail(machine: Machine, model: Model, shard: float, backward: float, bytes_per_param: float) -> tuple[float, float]:
    """Seconds from the end of backward until the last bucket is stepped, and the time of all steps together."""
    per_bucket = shard / model.buckets
    step = bytes_per_param * per_bucket / machine.memory
    arrived = finished = 0.0
    for bucket in range(model.buckets):
        final = backward * (bucket + 1) / model.buckets
        arrived = max(final, arrived) + 2 * per_bucket / machine.link_down
        finished = max(arrived, finished) + step
    return finished - backward, model.buckets * step


def table(machine: Machine, model: Model, ranks: Sequence[int] = RANKS) -> str:
    """As docs/scaling.md has it."""
    lines = [
        "| ranks | compute | collectives | optimizer | exposed | step | clipped step | verdict | of the step |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for count in ranks:
        row = simulate(machine, model, count)
        seconds = (row.compute, row.collectives, row.optimizer, row.exposed, row.step, row.clipped_step)
        cells = " | ".join(f"{1e3 * value:.1f}" for value in seconds)
        lines.append(f"| {count} | {cells} | {1e3 * row.verdict:.2f} | {row.verdict_share:.2%} |")
    return "\n".join(lines)


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


def fewest_ranks_where_the_verdict_shows(machine: Machine, model: Model) -> int:
    """The first power of two at which the exchange outlasts the tail that hides it; 0 if none up to 2 ** 20."""
    for exponent in range(21):
        row = simulate(machine, model, 2**exponent)
        shard = model.parameters / 2**exponent
        backward = row.step - row.exposed
        if row.verdict > _tail(machine, model, shard, backward, 29.2)[0] and not math.isclose(row.verdict, 0.0):
            return int(2**exponent)
    return 0


if __name__ == "__main__":
    main()
