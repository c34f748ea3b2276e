"""``optimizer.state`` is torch's: nothing speculated shows, and what a program writes, takes out or puts in counts."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError
from tests.support.adamw_training import batch, model_of, pair, train


def first(model: nn.Module) -> Tensor:
    return next(model.parameters())


def backward(model: nn.Module, seed: int) -> None:
    batch(model, seed).backward()
    time.sleep(0.01)  # so that worker threads have stepped what is speculated


FORMS: list[dict[str, Any]] = [{"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {"master_dtype": "split"}]


@pytest.mark.parametrize("keep", [lambda tensor: tensor[1:], lambda tensor: tensor.detach().numpy()])
def test_what_is_kept_shows_no_speculation_until_it_is_let_go(keep: Callable[[Tensor], Any]) -> None:
    with pair(bucket_numel=1024) as (model, optimizer, _, _):
        train(model, optimizer, range(2))
        param = first(model)
        kept = keep(optimizer.state[param]["exp_avg"])
        moment = optimizer.state[param]["exp_avg"].clone()
        optimizer.zero_grad()
        before = optimizer.stats()["buckets_speculated"]
        with pytest.warns(RuntimeWarning, match="keeps a tensor of optimizer.state"):
            backward(model, 2)
            engine_has = next(shard for shard in optimizer._engine.shards if shard.numel == param.numel())
            assert torch.equal(engine_has.exp_avg, moment.view(-1)), "before the step"
            waits = [one for one in optimizer._engine.buckets if one.why_not_speculated]
            assert {one.why_not_speculated for one in waits} == {f"the program holds state of {engine_has.name}"}
            have_journals = sum(memory.users for memory in optimizer._engine.layout.journals)
            assert have_journals == len(optimizer._engine.buckets) - len(waits), "room that others need"
            optimizer.step()
        assert not torch.equal(engine_has.exp_avg, moment.view(-1))
        assert optimizer.stats()["buckets_speculated"] - before < len(optimizer._engine.buckets)
        del kept
        gc.collect()
        optimizer.zero_grad()
        before = optimizer.stats()["buckets_speculated"]
        backward(model, 3)
        optimizer.step()
        assert optimizer.stats()["buckets_speculated"] - before == len(optimizer._engine.buckets)


@pytest.mark.parametrize(
    "edit",
    [
        lambda entry: entry.__delitem__("exp_avg"),
        lambda entry: entry.update(exp_avg=torch.zeros(3)),
        lambda entry: entry.update(exp_avg_sq=None),
        lambda entry: entry.update(step="two"),
        lambda entry: entry["step"].fill_(1.5),
        lambda entry: torch.zeros(3),
    ],
)
def test_an_entry_that_is_none_is_refused_until_it_is_mended(edit: Callable[[Any], Any], tmp_path: Path) -> None:
    with pair() as (model, optimizer, twin, plain):
        train(model, optimizer, range(2))
        train(twin, plain, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        backward(model, 2)
        found = edit(optimizer.state[first(model)])
        if isinstance(found, Tensor) and found.dim():
            optimizer.state[first(model)] = found
        for call in (optimizer.step, optimizer.state_dict, lambda: checkpoints.save(tmp_path / "a", model, optimizer)):
            with pytest.raises(ArgumentError, match=r"optimizer\.state of .*(step|exp_avg|expected a dict)"):
                call()
        assert not (tmp_path / "a").exists()
        optimizer.load_state_dict(saved)  # takes the place of all that was edited
        train(model, optimizer, range(2, 4))
        train(twin, plain, range(2, 4))
        assert optimizer.state_digests() == plain.state_digests()


def test_copies_refuse_operations_in_place_and_putting_one_back_changes_no_bit() -> None:
    """As frameworks do that move state to another device and back."""
    for options in [{}, *FORMS]:
        model = model_of(torch.bfloat16)
        with AdamW(model.parameters(), **options) as optimizer:
            for step in range(3):
                train(model, optimizer, [step])
                digests = optimizer.state_digests()
                for param in model.parameters():
                    for name, value in optimizer.state[param].items():
                        optimizer.state[param][name] = value.clone()
                assert optimizer.state_digests() == digests
            entry = optimizer.state[first(model)]
            assert "tensor(3.)" in repr(entry) and "tensor([])" not in repr(entry)
            for other in (copy.copy(entry), copy.deepcopy(entry), pickle.loads(pickle.dumps(entry))):
                assert isinstance(other, dict) and torch.equal(other["exp_avg"], entry["exp_avg"])
            copied = {"8bit": "exp_avg", "split": "master"}.get([*options.values(), ""][0])
            if copied:
                with pytest.raises(RuntimeError, match="make a clone"):
                    entry[copied].zero_()
                entry[copied] = entry[copied].clone().fill_(0.25)
                assert entry[copied].eq(0.25).all()
