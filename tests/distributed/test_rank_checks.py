"""Ranks that have diverged are found and named, on every rank and in bounded time."""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from superoffload.distributed.group import Gather, RankGroup, rank_timeout
from superoffload.errors import ArgumentError
from superoffload.host.tensors import local_of
from tests.support.rank_faults import assert_found, train_until_error
from tests.support.rank_processes import Net, error_of, flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of

# In the first steps it is found at once (on meshes: test_meshes.py). light: the next step for what is the same on all
# ranks, else when its turn comes.
FOUND = [
    ("swap_shards", 2, False, "light", 2, "layers.0.0.weight: the published parameter is not round(master)"),
    ("apply_twice", 2, True, "light", 2, "differs from that of rank"),
    ("skip_publish", 10, False, "light", 40, "the published parameter is not round(master)"),
    ("drop_clip", 10, False, "light", 11, "rank 1: gradient factor is"),
    ("apply_twice", 10, True, "light", 50, "differs from that of rank"),
    ("stale_parameters", 10, False, {"full": 7}, 14, "what its forward reads is not what rank"),
]


@pytest.mark.parametrize(("fault", "planted", "replicas", "check", "latest", "text"), FOUND)
def test_faults_are_found(fault: str, planted: int, replicas: bool, check: Any, latest: int, text: str) -> None:
    results = on_ranks(4 if replicas else 2, train_until_error, fault, planted, 1, replicas, check)
    assert_found(results, text, planted, latest)
    assert planted > 2 or "step 2" in results[0][1]


def test_without_a_fault_or_checks_nothing_is_found() -> None:
    assert on_ranks(4, train_until_error, "none", 0, 0, True, {"full": 3}, 8) == [[8, ""]] * 4
    assert on_ranks(2, train_until_error, "drop_clip", 2, 1, False, "off", 6) == [[6, ""]] * 2


def sharded() -> Net:
    return shard(net(torch.float32), flat_mesh())


def odd(what: str, check: str = "light") -> str:
    """Rank 1 steps with another setting, or without a gradient, or raises, or does what the others do not."""
    model = sharded()
    with optimizer_of(model, rank_timeout=60.0, rank_check=check) as optimizer:
        optimizer.add_param_group({"params": list(model.frozen.parameters())})
        for step in range(3):
            optimizer.zero_grad()
            model.frozen.requires_grad_(step == 2 and what == "train a frozen parameter")
            model.loss(tokens_of(step, dist.get_rank())).backward()
            if step < 2:
                optimizer.step()
        before, steps, session = optimizer.state_digests(), optimizer.stats()["steps"], optimizer._ranks.session
        assert session is not None

        def act() -> None:
            if dist.get_rank() == 0:
                model.frozen.zero_grad(set_to_none=True)
            elif what == "gradient":
                model.head.weight.grad = None
            elif what == "max_grad_norm":
                optimizer.max_grad_norm = 7.0
            elif what == "load_state_dict":
                optimizer.load_state_dict(optimizer.state_dict())
            elif what == "skip step":
                session.begin()
            elif "lr" in what:
                optimizer.param_groups[0]["lr"] = {"lr": 0.125, "negative lr": -1.0}[what]
            optimizer.step()

        error = error_of(act)
        if error.startswith("RankError") and what != "load_state_dict":
            assert not optimizer._engine.is_filling, "the step was abandoned"
        assert optimizer.stats()["steps"] == steps
        assert optimizer.state_digests() == before or what == "train a frozen parameter", "it gets state"
        return error


@pytest.mark.parametrize(
    ("what", "check", "text"),
    [
        ("lr", "light", "step 3: the ranks step with different settings: rank 1: lr of group 0 is 0.125"),
        ("max_grad_norm", "light", "rank 1: max_grad_norm is 7.0, on rank 0 1.0"),
        ("gradient", "off", "not the same parameters have a gradient: rank 1: head.weight is False.*give it zeros$"),
        ("load_state_dict", "light", r"the ranks do different things: .*rank 1: load_state_dict\(\)"),
        ("train a frozen parameter", "light", "the ranks do different things: .*; rank 1: new parameters"),
        ("skip step", "light", "the ranks do different things: .*rank 1: the verdict of step 4"),
        ("negative lr", "light", "step 3: rank 1 raised before the verdict.*abandoned on every rank"),
    ],
)  # fmt: skip
def test_what_one_rank_does_alone_is_named_by_all_and_none_steps(what: str, check: str, text: str) -> None:
    first, second = on_ranks(2, odd, what, check)
    assert re.match(f"RankError: .*{text}", first), first
    assert second.startswith("ArgumentError: lr=-1.0") if what == "negative lr" else first == second


def write_masters(*, hold: bool) -> tuple[str, list[str]]:
    """A program writes a master before a step that is skipped, and before one in which that has no gradient. Then a
    publish is lost."""
    model = sharded()
    with optimizer_of(model, rank_check={"full": 1}) as optimizer:
        weight, kept, digests = model.head.weight, list[Tensor](), list[str]()

        def train(steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                model.loss(tokens_of(step, dist.get_rank())).backward()
                if step in (3, 5):
                    master = local_of(optimizer.state[weight]["master"] if step == 3 or not hold else kept[0])
                    master.mul_(1.25)
                    kept.extend([master] if hold else [])
                if step == 3:
                    assert weight.grad is not None
                    local_of(weight.grad).fill_(torch.inf)
                elif step == 5:
                    weight.grad = None
                optimizer.step()
                digests.append(optimizer.state_digests()["published"])

        train(range(7))
        assert optimizer.stats()["skipped_steps"] == 1
        local_of(weight).data.view(-1)[: dist.get_rank() + 1].view(torch.int32).add_(1)
        session = optimizer._ranks.session
        assert session is not None
        return error_of(session.check_everything), digests


@pytest.mark.parametrize("hold", [False, True])
def test_a_written_master_is_no_lost_publish(hold: bool) -> None:
    for error, digests in on_ranks(2, partial(write_masters, hold=hold)):
        assert re.match("RankError: .*the published parameter is not round", error)
        assert digests[2] == digests[3], "nothing was skipped"


def made_differently() -> list[str]:
    def error(layers: int = 2, **options: Any) -> str:
        def make() -> None:
            with optimizer_of(net(torch.float32, layers=layers), **options):
                pass

        return error_of(make)

    errors = [error(layers=1 + dist.get_rank()), error(rank_check={"full": 4} if dist.get_rank() else "light")]
    with mock.patch("superoffload.distributed.session.MOST_CLASSES", 0):  # no set of replicas has room in the message
        return [*errors, error()]


def test_optimizers_that_do_not_fit_together_are_refused() -> None:
    for models, checks, meshes in on_ranks(2, made_differently):
        assert "RankError" in models and "were made differently" in models and "layers.1" in models
        assert "RankError: ranks have diverged: the optimizers" in checks and "rank 1: rank_check is" in checks
        assert meshes.startswith("ArgumentError: params: 1 different sets of replicas on one rank, expected at most 0")


def alone_in_backward(fails: bool) -> tuple[bool, list[bool], str]:
    """A worker of rank 1 fails while speculating; or rank 1 speculates nothing, as if its partial norm proved a clip.
    The others step, so it completes the step. Whether the bits are those of all alike; who speculated; any error."""
    digests: list[Any] = []
    speculated, message = [], ""
    for odd in (False, True):
        model = sharded()
        with optimizer_of(model, speculation="always", max_grad_norm=2.0) as optimizer:
            if odd and dist.get_rank() == 1 and not fails:
                optimizer._engine.schedule.mode = "never"
            for step in range(3):
                optimizer.zero_grad()
                if odd and step == 1 and dist.get_rank() == 1 and fails:
                    optimizer._engine.pool.inject_fault(1, "a bit fell over")
                model.loss(tokens_of(step, dist.get_rank())).backward()
                try:
                    optimizer.step()
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"
            digests.append(optimizer.state_digests())
            speculated.append(optimizer.stats()["buckets_speculated"] > 0)
    return digests[0] == digests[1], speculated, message


def test_what_one_rank_speculates_changes_nothing_on_another() -> None:
    assert on_ranks(2, alone_in_backward, False) == [(True, [True, True], ""), (True, [True, False], "")]
    first, (same, _, message) = on_ranks(2, alone_in_backward, True)
    assert first == (True, [True, True], "") and same
    assert "WorkerError: " in message and "a bit fell over" in message


def bytes_per_step() -> list[int]:
    """Bytes this rank sends through our group in each of ten steps."""
    model = sharded()
    sent: list[int] = []
    counts: list[int] = []
    init = Gather.__init__

    def counting(self: Gather, group: RankGroup, what: str, mine: torch.Tensor) -> None:
        sent.append(mine.numel() * mine.element_size())
        init(self, group, what, mine)

    with optimizer_of(model) as optimizer, mock.patch.object(Gather, "__init__", counting):
        for step in range(10):
            sent.clear()
            optimizer.zero_grad()
            model.loss(tokens_of(step, dist.get_rank())).backward()
            optimizer.step()
            counts.append(sum(sent) if len(sent) == 1 else -1)
    return counts


def test_a_step_costs_one_exchange_of_at_most_128_bytes() -> None:
    for counts in on_ranks(2, bytes_per_step):
        assert counts[:3] == [-1, -1, -1], "the first three are checked in full"
        assert all(0 < count <= 128 for count in counts[3:])


def test_a_bad_time_out_is_named_by_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"rank_timeout=0.0: expected a finite number of at least 0\.1"):
        rank_timeout(0.0)
    for given, words in (("soon", "='soon': expected a number of seconds"), ("nan", "=nan: expected a finite number")):
        monkeypatch.setenv("SUPEROFFLOAD_RANK_TIMEOUT", given)
        with pytest.raises(ArgumentError, match=f"SUPEROFFLOAD_RANK_TIMEOUT{words}"):
            rank_timeout(None)
