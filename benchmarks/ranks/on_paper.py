"""Counts what it takes a thousand ranks to know who owns what: their messages, and the time to sort them.

No other process runs. One rank's real ``RankSession`` gets, in the place of a network, the messages that the sessions
of the other ranks really make, and then takes a step in the same way. So this counts bytes, and processor time; what a
network adds is in docs/scaling.md.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from superoffload.distributed.group import FRAME, Hosts
from superoffload.distributed.ownership import Holding, box_at, dtensor_kind
from superoffload.distributed.rank_checks import Held
from superoffload.distributed.session import RankCheck, RankSession
from superoffload.errors import ArgumentError

TENSOR, STAGES = 8, 4
LAYERS, HIDDEN, KEYS, MLP, VOCABULARY = 32, 4096, 1024, 14336, 128_256
_COLUMN, _ROW, _NORM = "column", "row", "norm"  # how tensor parallelism cuts
_REPEATS = 5


@dataclass(frozen=True)
class Layout:
    """Describes a mesh: pipeline stages, ranks that fully_shard shards over, ranks that share each matrix."""

    stages: int
    shards: int
    tensor: int

    @property
    def name(self) -> str:
        parts = {"PP": self.stages, "FSDP": self.shards, "TP": self.tensor}
        return " x ".join(f"{what} {count}" for what, count in parts.items() if count > 1)

    @property
    def ranks(self) -> int:
        return self.stages * self.shards * self.tensor

    def stage_of(self, rank: int) -> int:
        return rank // (self.shards * self.tensor)


def layouts_of(ranks: int) -> list[Layout]:
    """Returns the meshes that are compared; raises ArgumentError if they do not fit ``ranks``."""
    step = TENSOR * STAGES
    if ranks < 2 * step or ranks % step:
        raise ArgumentError(
            f"on_paper={ranks}: expected a multiple of {step}, at least {2 * step}, for {TENSOR} ranks that share each "
            f"matrix and {STAGES} pipeline stages"
        )
    return [Layout(1, ranks, 1), Layout(1, ranks // TENSOR, TENSOR), Layout(STAGES, ranks // step, TENSOR)]


def parameters_of(layout: Layout, stage: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields name, shape and cut of each parameter of a stage, of a model with 8 billion."""
    each = LAYERS // layout.stages
    if stage == 0:
        yield "embedding.weight", (VOCABULARY, HIDDEN), _COLUMN
    for layer in range(stage * each, (stage + 1) * each):
        for name, shape, cut in (
            ("attention_norm", (HIDDEN,), _NORM),
            ("attention.q", (HIDDEN, HIDDEN), _COLUMN),
            ("attention.k", (KEYS, HIDDEN), _COLUMN),
            ("attention.v", (KEYS, HIDDEN), _COLUMN),
            ("attention.out", (HIDDEN, HIDDEN), _ROW),
            ("mlp_norm", (HIDDEN,), _NORM),
            ("mlp.gate", (MLP, HIDDEN), _COLUMN),
            ("mlp.up", (MLP, HIDDEN), _COLUMN),
            ("mlp.down", (HIDDEN, MLP), _ROW),
        ):
            yield f"blocks.{layer}.{name}.weight", shape, cut
    if stage == layout.stages - 1:
        yield "norm.weight", (HIDDEN,), _NORM
        yield "head.weight", (VOCABULARY, HIDDEN), _COLUMN


def held_by(layout: Layout, rank: int) -> list[Held]:
    """Describes the parameters of a rank as its optimizer would; without memory."""
    sizes: tuple[int, ...] = (layout.shards,)
    coordinate: tuple[int, ...] = (rank // layout.tensor % layout.shards,)
    placed: Mapping[str, tuple[Any, ...]] = dict.fromkeys((_COLUMN, _ROW, _NORM), (Shard(0),))
    if layout.tensor > 1:  # as fully_shard places what tensor parallelism has cut
        sizes, coordinate = (*sizes, layout.tensor), (*coordinate, rank % layout.tensor)
        placed = {
            _COLUMN: (_StridedShard(0, split_factor=layout.tensor), Shard(0)),
            _ROW: (Shard(0), Shard(1)),
            _NORM: (Shard(0), Replicate()),
        }
    held = []
    for index, (name, shape, cut) in enumerate(parameters_of(layout, layout.stage_of(rank))):
        box = box_at(name, shape, placed[cut], sizes, coordinate)
        holding = Holding(dtensor_kind(placed[cut], sizes), shape, box)
        shard: Any = SimpleNamespace(index=index, group=0, name=name)
        held.append(Held(name, torch.empty(shape, dtype=torch.bfloat16, device="meta"), shard, holding))
    return held


class _Sent(Exception):
    """Ends a session's construction where it would wait for messages that are not there yet."""


class PaperGroup:
    """Takes the place of a ``RankGroup``. ``answers``: of each exchange, what all ranks have sent. ``sent``: what this
    rank has; ``seconds`` are those between."""

    failure = None

    def __init__(self, ranks: int, rank: int, answers: Sequence[Sequence[bytes]] = ()) -> None:
        self.ranks, self.rank = list(range(ranks)), rank
        self.hosts = Hosts({})
        self.sent: list[bytes] = []
        self._answers = answers

    def number_of_session(self) -> int:
        return 1

    def exchange_objects(self, what: str, value: Any) -> list[Any]:
        self.sent.append(pickle.dumps(value))
        if len(self.sent) > len(self._answers):
            raise _Sent
        return [pickle.loads(data) for data in self._answers[len(self.sent) - 1]]

    def exchange(self, what: str, payload: bytes) -> Any:
        return SimpleNamespace(wait=lambda: [payload] * len(self.ranks))


def session_of(layout: Layout, rank: int, answers: Sequence[Sequence[bytes]] = ()) -> tuple[RankSession, PaperGroup]:
    group: Any = PaperGroup(layout.ranks, rank, answers)
    return RankSession(group, RankCheck(light=True, every=0), None), group


def messages_of(layout: Layout) -> list[list[bytes]]:
    """Returns what all ranks send in each exchange while their optimizers are made."""
    answers: list[list[bytes]] = []
    while True:
        told: list[bytes] = []
        for rank in range(layout.ranks):
            # The second exchange tells what each has, which is the same on all ranks of a stage.
            first_of_stage = layout.stage_of(rank) * layout.shards * layout.tensor
            if answers and rank != first_of_stage:
                told.append(told[first_of_stage])
                continue
            session, group = session_of(layout, rank, answers)
            try:
                session.add(held_by(layout, rank))
            except _Sent:
                told.append(group.sent[-1])
            else:
                return answers
        answers.append(told)


def on_paper(ranks: int) -> list[dict[str, Any]]:
    """Returns a row per mesh. Seconds are processor time of one rank."""
    return [_row(layout) for layout in layouts_of(ranks)]


def _row(layout: Layout) -> dict[str, Any]:
    answers, rank = messages_of(layout), layout.ranks - 1
    made, steps = [], []
    for _ in range(_REPEATS):
        held = held_by(layout, rank)
        session, _group = session_of(layout, rank, answers)
        began = time.thread_time()
        session.add(held)
        made.append(time.thread_time() - began)
        steps.append(_seconds_of_step(session, held))
    return {
        "name": layout.name,
        "ranks": layout.ranks,
        "parameters": len(held),
        "numel": sum(math.prod(shape) for s in range(layout.stages) for _, shape, _ in parameters_of(layout, s)),
        "exchanges": len(answers),
        "bytes_sent": sum(max(map(len, told)) for told in answers),  # all are as long as the longest
        "seconds_median": statistics.median(made),
        "seconds_min": min(made),
        "step_bytes": FRAME,
        "step_seconds_median": statistics.median(steps),
    }


def _seconds_of_step(session: RankSession, held: Sequence[Held]) -> float:
    """Measures the processor time of a step's messages: making one, comparing all ranks', adding up their sums."""
    sums = {one.shard.index: 1.0 for one in held}
    began = time.thread_time()
    session.begin()
    session.agree_on({"lr": 1e-3}, found_inf=False)
    session.start(sums)
    session.finish()
    session.count(applied=True, factor=1.0)
    return time.thread_time() - began
