"""A rank that is killed, stalls or raises: the others end with an error in time, and a restart goes on bit-exactly."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from superoffload import AdamW, checkpoints
from superoffload.distributed.group import _GROUPS, Hosts, RollCall
from superoffload.distributed.session import RankSession
from superoffload.errors import RankError
from tests.convergence.local_ranks import LocalRanks, Outcome
from tests.support.rank_processes import BF16, Net, flat_mesh, net, optimizer_of, shard, tokens_of

TIMEOUT = 5.0
PATIENT = 60.0  # where no rank is lost: a busy machine can hold a rank up for seconds
STEPS, FAILS_AT = 6, 4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(how: str, model: Net, optimizer: Any) -> Any:
    """What happens to this rank, to be entered for the fatal step."""
    if how == "killed in backward":

        def die_behind(module: Any, inputs: Any, outputs: Any) -> None:
            outputs.register_hook(lambda grad: die())

        model.layers[0].register_forward_hook(die_behind)
        return nullcontext()
    if how == "killed in step":
        return mock.patch.object(optimizer._engine, "apply", lambda verdict, **named: die())
    if how == "killed in the exchange":
        # Right before its message goes out: the other rank waits for it.
        return mock.patch.object(RankSession, "start", lambda session, sums: die())
    if how == "stalls":
        return mock.patch.object(optimizer._parts.step, "_take_stock", lambda scale: time.sleep(200.0))
    assert how == "raises"
    return mock.patch.object(model, "loss", mock.Mock(side_effect=ValueError("in user code")))


def train(folder: str, how: str) -> dict[str, str]:
    """From the newest checkpoint on, if there is one; rank 1 has its accident at the given step."""
    model = shard(net(torch.bfloat16), flat_mesh(), BF16)
    with optimizer_of(model, max_grad_norm=0.5, rank_timeout=TIMEOUT if how else PATIENT) as optimizer:
        newest = checkpoints.latest(folder)
        first = 1 if newest is None else 1 + checkpoints.load(newest, model, optimizer)["step"]
        for step in range(first, STEPS + 1):
            optimizer.zero_grad()
            if how and step == FAILS_AT and dist.get_rank() == 1:
                with plant(how, model, optimizer):
                    model.loss(tokens_of(step, 1)).backward()
                    optimizer.step()
            else:
                model.loss(tokens_of(step, dist.get_rank())).backward()
                optimizer.step()
            checkpoints.save(f"{folder}/step-{step}", model, optimizer, extra={"step": step}, keep=1)
        return optimizer.state_digests()


def run(folder: Path, how: str) -> list[Outcome]:
    folder.mkdir(exist_ok=True)
    ranks = LocalRanks(2, timeout=TIMEOUT if how else PATIENT)
    try:
        ranks.start(train, str(folder), how)
        if how == "stalls":  # does not wait for the rank that sleeps
            return [*ranks.collect(100.0, [0]), Outcome(error="stalled")]
        return ranks.collect(100.0)
    finally:
        ranks.close()
        assert all(process.exitcode is not None for process in ranks.processes), "a zombie"


ACCIDENTS = {
    # The collective that meets the dead rank is FSDP2's own, so is the error.
    "killed in backward": "Connection ",
    "killed in step": "rank 1 did not take part within 5 s",
    "killed in the exchange": "rank 1 did not take part within 5 s",
    "stalls": "the verdict of step 4: rank 1 did not take part within 5 s",
    "raises": "",
}


def story(folder: Path, how: str) -> tuple[list[Outcome], list[Outcome]]:
    """The accident, and the restart."""
    return run(folder, how), run(folder, "")


def test_the_others_end_in_time_and_a_restart_continues(tmp_path: Path) -> None:
    """Two at a time: most of each is waiting for a time-out."""
    with ThreadPoolExecutor(2) as threads:
        whole = threads.submit(run, tmp_path / "whole", "")
        stories = {how: threads.submit(story, tmp_path / how, how) for how in ACCIDENTS}
    assert not any(outcome.error for outcome in whole.result()), whole.result()
    for how, told in stories.items():
        (survivor, lost), again = told.result()
        assert survivor.error and "no answer" not in survivor.error, f"{how}: the other rank cannot have finished"
        if how == "raises":  # it may wait in FSDP2's collective or in ours
            assert "ValueError: in user code" in lost.error
            assert "RankError" in survivor.error or "RuntimeError" in survivor.error
        else:
            assert ACCIDENTS[how] in survivor.error, (how, survivor.error)
            assert lost.error == ("stalled" if how == "stalls" else "lost, with exit code -9")
        assert again == whole.result(), how


class EndingStore:
    """The roll call's store, in the process of rank 0: answers so many questions, then it is gone; or, behind a link
    that breaks, ``silent``: no answer comes any more, and no error either."""

    def __init__(self, answers: int, silent: bool) -> None:
        self.answers, self.silent = answers, silent

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        self.answers -= 1
        if self.answers < 0:
            if self.silent:
                threading.Event().wait(600.0)
            raise RuntimeError("connection reset by peer")
        return keys[0].endswith("/0")


def test_a_first_rank_that_has_answered_and_ended_is_not_called_lost() -> None:
    for silent, answers, missing in ((False, 0, [0]), (True, 1, [0]), (False, 2, [2])):
        roll_call = RollCall([0, 1, 2], 1, 0.2)
        roll_call.address = ("10.0.0.1", 29500)
        vars(roll_call)["_store"] = EndingStore(answers, silent)
        why = "could not be reached" if silent else "has ended"
        unknown = f"; the roll call of rank 0 on 10.0.0.1 {why}, so nothing is known of rank 2"
        assert roll_call.who_is_missing(7, Hosts({})) == (missing, unknown if missing == [0] else "")


def train_in_two_worlds(folder: str) -> tuple[int, int, str]:
    """In a rank: how many groups of ours there are in the second world and after it; what an optimizer of the first
    one says in the second."""
    rank, weights = int(os.environ["RANK"]), [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizers: list[Any] = []
    for number, weight in enumerate(weights):
        store = f"file://{folder}/store-{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        optimizers.append(AdamW([weight], speculation="always", rank_timeout=TIMEOUT))
        for step in range(2):
            weight.grad = torch.full((8,), 1.0 + step)
            optimizers[number].step()
        if number == 0:
            dist.destroy_process_group()
    assert torch.equal(*weights)
    kept = sum(map(len, _GROUPS.values()))
    weights[0].grad = torch.ones(8)
    with pytest.raises(RankError) as caught:
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.close()
    dist.destroy_process_group()
    return kept, sum(map(len, _GROUPS.values())), str(caught.value)


def test_a_second_world_has_groups_of_its_own(tmp_path: Path) -> None:
    """destroy_process_group() and init_process_group() again, in the same processes."""
    with LocalRanks(2, init=False) as ranks:
        for kept, afterwards, error in ranks.run(train_in_two_worlds, str(tmp_path), limit=100.0):
            assert (kept, afterwards) == (1, 0)
            assert "destroy_process_group()" in error and "make a new optimizer" in error
