"""``optimizer.state`` is torch's: nothing speculated shows, and what a program writes, takes out or puts in counts."""

from __future__ import annotations

import copy
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError, StateError
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, pair, train

MOMENTS = ("exp_avg", "exp_avg_sq")
Edit = Callable[[Any, Optimizer], None]


def first(model: nn.Module) -> Tensor:
    return next(model.parameters())


def backward(model: nn.Module, seed: int) -> None:
    batch(model, seed).backward()
    time.sleep(0.01)  # so that worker threads have stepped what is speculated


def between(edit: Edit) -> Callable[[nn.Module, Optimizer], None]:
    """Training, with ``edit`` between the third backward and its step."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(model, 2)
        edit(model, optimizer)
        optimizer.step()
        train(model, optimizer, range(3, 6))

    return scenario


# ---- values ---------------------------------------------------------------------------------------------------------


def zeroed(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].zero_()


def scaled_view(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[first(model)]["exp_avg_sq"].view(-1)[5:].mul_(4.0)


def written_by_numpy(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[first(model)]["exp_avg"].numpy()[:] = 0.5


def assigned(model: nn.Module, optimizer: Optimizer) -> None:
    entry = optimizer.state[first(model)]
    entry["exp_avg"] = -entry["exp_avg"]


def steps_zeroed(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        optimizer.state[param]["step"].zero_()


def steps_assigned(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[first(model)]["step"] = torch.tensor(7.0)


def cleared(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def one_deleted(model: nn.Module, optimizer: Optimizer) -> None:
    del optimizer.state[first(model)]


def all_replaced(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def one_replaced(model: nn.Module, optimizer: Optimizer) -> None:
    param = first(model)
    optimizer.state[param] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.full_like(param, 0.25),
        "exp_avg_sq": torch.full_like(param, 0.5),
    }


def exchanged(model: Any, optimizer: Optimizer) -> None:
    param, other = model[0].bias, model[2].bias
    optimizer.state[param], optimizer.state[other] = optimizer.state[other], optimizer.state[param]


EDITS: list[Edit] = [
    zeroed,
    scaled_view,
    written_by_numpy,
    assigned,
    steps_zeroed,
    steps_assigned,
    cleared,
    one_deleted,
    all_replaced,
    one_replaced,
    exchanged,
]
FORMS: list[dict[str, Any]] = [{"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {"master_dtype": "split"}]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_before_step_counts_as_in_torch(edit: Edit) -> None:
    assert check_scenario(between(edit), max_grad_norm=100.0, bucket_numel=1024)["buckets_committed"] > 0


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_in_every_form_of_state(options: dict[str, Any]) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for edit in (assigned, one_replaced, exchanged):
            between(edit)(model, optimizer)

    check_scenario(scenario, torch.bfloat16, bucket_numel=1024, **options)


def test_state_of_before_comes_back_with_its_mapping() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        aside = optimizer.state
        optimizer.state = defaultdict(dict)
        train(model, optimizer, range(3, 5))
        optimizer.state = aside
        train(model, optimizer, range(5, 7))

    check_scenario(scenario)


# ---- tensors that a program keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep",
    [lambda tensor: tensor[1:], lambda tensor: tensor.detach().numpy(), lambda tensor: tensor.untyped_storage()],
    ids=["a view", "a NumPy array", "its storage"],
)
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


def test_writes_to_kept_tensors_count_at_any_time() -> None:
    kept: dict[int, list[Tensor]] = {}

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        tensors = kept.setdefault(
            id(optimizer), [optimizer.state[p][name] for p in model.parameters() for name in MOMENTS]
        )
        for seed in range(2, 6):
            optimizer.zero_grad()
            if seed == 3:
                tensors[0].mul_(-1.0)
            backward(model, seed)
            if seed % 2:
                for tensor in tensors:
                    tensor.mul_(0.5)
            optimizer.step()
            tensors[2].mul_(1.5)

    with pytest.warns(RuntimeWarning, match="keeps a tensor of optimizer.state"):
        check_scenario(scenario, bucket_numel=1024)


# ---- what cannot be -------------------------------------------------------------------------------------------------


def without_exp_avg(model: nn.Module, optimizer: AdamW) -> None:
    del optimizer.state[first(model)]["exp_avg"]


def of_another_shape(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.state[first(model)] = {**optimizer.state[first(model)], "exp_avg": torch.zeros(3)}


def no_mapping(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.state[first(model)] = torch.zeros(3)


def half_a_step(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.state[first(model)]["step"].fill_(1.5)


@pytest.mark.parametrize("edit", [without_exp_avg, of_another_shape, no_mapping, half_a_step])
def test_an_entry_that_is_none_is_refused_until_it_is_mended(edit: Edit, tmp_path: Path) -> None:
    with pair() as (model, optimizer, twin, plain):
        train(model, optimizer, range(2))
        train(twin, plain, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        backward(model, 2)
        edit(model, optimizer)
        for call in (optimizer.step, optimizer.state_dict, lambda: checkpoints.save(tmp_path / "a", model, optimizer)):
            with pytest.raises(ArgumentError, match=r"optimizer\.state of .*(step|exp_avg|expected a dict)"):
                call()
        assert not (tmp_path / "a").exists()
        optimizer.load_state_dict(saved)  # takes the place of all that was edited
        train(model, optimizer, range(2, 4))
        train(twin, plain, range(2, 4))
        assert optimizer.state_digests() == plain.state_digests()


@pytest.mark.parametrize(
    ("name", "value"), [("exp_avg", None), ("exp_avg_sq", torch.zeros(2)), ("step", -1), ("step", "two")]
)
def test_a_value_that_is_none_is_refused_in_step_unless_it_is_taken_back(name: str, value: Any) -> None:
    with pair() as (model, optimizer, twin, plain):
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(2))
            batch(one, 2).backward()
        before = optimizer.state[first(model)][name].clone()
        optimizer.state[first(model)][name] = value
        assert optimizer.state[first(model)][name] is value
        with pytest.raises(ArgumentError, match=rf"optimizer\.state of .*{name}"):
            optimizer.step()
        optimizer.state[first(model)][name] = before
        optimizer.step()
        plain.step()
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
            copied = (
                "exp_avg" if options.get("state_dtype") == "8bit" else "master" if "master_dtype" in options else ""
            )
            if copied:
                with pytest.raises(RuntimeError, match="make a clone"):
                    entry[copied].zero_()
                entry[copied] = entry[copied].clone().fill_(0.25)
                assert entry[copied].eq(0.25).all()


def test_nothing_is_assigned_while_state_is_in_a_file(tmp_path: Path) -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        train(model, optimizer, range(2))
        optimizer.sleep(tmp_path)
        with pytest.raises(StateError, match=r"call wake\(\) first"):
            optimizer.state[first(model)]["exp_avg"] = torch.zeros(48, 16)
        optimizer.wake()


# ---- saved ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [cleared, steps_zeroed, one_replaced])
def test_what_is_saved_after_an_edit_is_whole_and_resumes(edit: Edit, tmp_path: Path) -> None:
    with pair() as (model, optimizer, other, resumed):
        train(model, optimizer, range(2))
        edit(model, optimizer)
        saved = optimizer.state_dict()
        assert sorted(saved["state"]) == list(range(len(list(model.parameters()))))
        checkpoints.save(tmp_path / "a", model, optimizer)
        checkpoints.load(tmp_path / "a", other, resumed)
        for one, its in ((model, optimizer), (other, resumed)):
            train(one, its, range(2, 4))
        assert optimizer.state_digests() == resumed.state_digests()


def test_a_write_while_a_checkpoint_is_saved_is_not_in_it(tmp_path: Path) -> None:
    with pair() as (model, optimizer, other, resumed):
        train(model, optimizer, range(2))
        digests = optimizer.state_digests()
        saving = checkpoints.save_in_background(tmp_path / "a", model, optimizer, memory=1 << 30)
        zeroed(model, optimizer)
        saving.wait(60.0)
        checkpoints.load(tmp_path / "a", other, resumed)
        assert resumed.state_digests() == digests
