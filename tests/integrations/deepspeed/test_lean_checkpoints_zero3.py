"""Checkpoints of leaner state under ZeRO-3: resumed to the bit, and exchanged with every other form and with stock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from superoffload.errors import StateError
from tests.support.deepspeed.checkpoint_runs import (
    SCENARIOS,
    load_and_train,
    make_engine,
    make_universal,
    train_and_save,
)
from tests.support.deepspeed.lean_state import FORMS, LEAN
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import Scenario
from tests.support.deepspeed.training import OURS, end, masters
from tests.support.reference import eight_bit

pytestmark = pytest.mark.in_turn("lean checkpoints zero3")

MOMENTS = {"exp_avg": eight_bit.EXP_AVG, "exp_avg_sq": eight_bit.EXP_AVG_SQ}


@pytest.mark.parametrize("form", LEAN)
@pytest.mark.parametrize(("scenario", "way"), [("bf16", "ours"), ("bf16", "ours, later"), ("groups", "ours")])
def test_resume_is_bit_exact(scenario: str, way: str, form: str, two_ranks: Ranks, tmp_path: Path) -> None:
    straight = two_ranks.run(train_and_save, scenario, way, str(tmp_path), 4, 8, FORMS[form])
    resumed = two_ranks.run(load_and_train, scenario, way, str(tmp_path), 4, 8, FORMS[form])
    for (_, expected, record), (_, found, again) in zip(straight, resumed, strict=True):
        assert found == expected
        assert again == record


State = dict[str, list[Tensor]]


def partitions_after_a_load(folder: str, way: str, form: str) -> State:
    """This rank's partitions of moments, and the masters, as DeepSpeed's own helpers read them."""
    from deepspeed.utils import safe_get_local_optimizer_state

    engine = make_engine("bf16", way, FORMS[form])
    SCENARIOS["bf16"].train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="saved")
    params = list(engine.module.parameters())
    rank = torch.distributed.get_rank()
    found: State = {"master": list(masters(engine).values())}
    for name in MOMENTS:
        parts = [safe_get_local_optimizer_state(param, name) for param in params]
        sizes = [min(max(0, p.ds_numel - rank * len(part)), len(part)) for p, part in zip(params, parts, strict=True)]
        found[name] = [part[:numel].clone() for part, numel in zip(parts, sizes, strict=True)]
    end(engine)
    return found


def as_stored(value: Tensor, name: str, form: str) -> Tensor:
    """What a form keeps of a moment that it loads."""
    if "8bit" in form and value.numel():
        codes = eight_bit.written(value.numpy(), MOMENTS[name])
        return torch.from_numpy(np.array(eight_bit.read(codes, value.numel(), MOMENTS[name])))
    return value.bfloat16().float() if "bf16" in form else value


@pytest.mark.parametrize(
    ("first", "then"),
    [("stock", "8bit+split"), ("8bit+split", "stock"), ("stock", "bf16+split"), ("bf16", "stock")]
    + [("fp32", form) for form in LEAN]
    + [(form, "fp32") for form in LEAN]
    + [("8bit+split", "bf16"), ("split", "8bit"), ("bf16+split", "8bit+split")],
)
def test_forms_load_each_other(first: str, then: str, two_ranks: Ranks, tmp_path: Path) -> None:
    def way(form: str) -> tuple[str, str]:
        return ("stock", "fp32") if form == "stock" else ("ours", form)

    save_way, save_form = way(first)
    two_ranks.run(train_and_save, "bf16", save_way, str(tmp_path), 4, 4, FORMS[save_form])
    expected = two_ranks.run(partitions_after_a_load, str(tmp_path), save_way, save_form)
    found = two_ranks.run(partitions_after_a_load, str(tmp_path), *way(then))
    for theirs, ours in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs["master"], ours["master"], strict=True))
        for name in MOMENTS:
            assert any(len(value) > eight_bit.BLOCK for value in ours[name])
            for saved, value in zip(theirs[name], ours[name], strict=True):
                assert torch.equal(value.float(), as_stored(saved.float(), name, then))


@pytest.mark.parametrize("form", ["split", "8bit+split"])
def test_weights_only_and_before_the_first_step(form: str, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path), 4, 4)
    for found, _, _ in two_ranks.run(
        load_and_train, "bf16", "ours", str(tmp_path), 4, 4, FORMS[form], load_module_only=True
    ):
        assert all(torch.equal(value, value.bfloat16().float()) for value in found.values()), "masters follow weights"
    straight = two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path / "new"), 0, 3, FORMS[form])
    resumed = two_ranks.run(load_and_train, "bf16", "ours", str(tmp_path / "new"), 0, 3, FORMS[form])
    assert [digests for _, digests, _ in resumed] == [digests for _, digests, _ in straight]


def masters_of_universal(folder: str, form: str) -> tuple[dict[str, Tensor], list[int]]:
    scenario = SCENARIOS["bf16"]
    configured = Scenario({**scenario.config, "checkpoint": {"load_universal": True}})
    engine = configured.engine(OURS, {"speculation": "always", **FORMS[form]})
    configured.train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="universal")
    found, steps = masters(engine), list(engine.optimizer.parts.driver.steps)
    configured.train(engine, range(4, 6))  # trains on
    end(engine)
    return found, steps


def test_deepspeeds_tools_read_them(two_ranks: Ranks, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    form = "8bit+split"
    expected, _, _ = two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path), 4, 4, FORMS[form])[0]
    consolidated = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="saved")
    make_universal(tmp_path)
    one_rank = Ranks(1)
    try:
        found, steps = one_rank.run(masters_of_universal, str(tmp_path), form)[0]
    finally:
        one_rank.close()
    assert all(step == 4 for step in steps)
    for name, value in expected.items():
        assert torch.equal(consolidated[name].float(), value)
        assert torch.equal(found[name], value)


def published_at_ties(folder: str) -> tuple[int, bool]:
    """Masters half-way between two bf16 values, which DeepSpeed's own load would round to the even one."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    engine = make_engine("bf16", "ours", FORMS["split"])
    SCENARIOS["bf16"].train(engine, range(2))
    param = next(engine.module.parameters())
    bits = (torch.arange(param.ds_numel, dtype=torch.int32) << 16) + 0x3C008000
    safe_set_full_fp32_param(param, bits.view(torch.float32).view(param.ds_shape))
    engine.save_checkpoint(folder, tag="saved")
    engine.load_checkpoint(folder, tag="saved")
    with deepspeed.zero.GatheredParameters([param]):
        found = param.detach().flatten().view(torch.int16).to(torch.int32)
    expected = (bits + 0x8000) >> 16
    end(engine)
    return int((expected & 1).sum()), torch.equal(found, expected)


def test_a_load_publishes_ties_as_a_step_does(two_ranks: Ranks, tmp_path: Path) -> None:
    for odd, same in two_ranks.run(published_at_ties, str(tmp_path)):
        assert odd > 100
        assert same


def masters_left_alone() -> bool:
    engine = make_engine("bf16", "ours", FORMS["split"])
    SCENARIOS["bf16"].train(engine, range(3))
    before = engine.optimizer.state_digests()
    with engine.optimizer.parts.saved_state.writing_masters():
        flats = [flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat]
    same = bool(min(flats) > 0 and engine.optimizer.state_digests() == before)
    end(engine)
    return same


def test_masters_that_a_load_leaves_alone_keep_their_bits(two_ranks: Ranks) -> None:
    assert two_ranks.run(masters_left_alone) == [True, True]


def load_damaged(folder: str) -> tuple[str, bool, bool]:
    """A NaN in a moment; what is there afterwards, and that a good checkpoint still loads."""
    engine = make_engine("bf16", "ours", FORMS["8bit+split"])
    SCENARIOS["bf16"].train(engine, range(2))
    engine.save_checkpoint(folder, tag="good")
    good = engine.optimizer.state_digests()
    state = engine.optimizer.state_dict()
    entries = {key: dict(entry) for key, entry in state["optimizer_state_dict"]["state"].items()}
    entries[0]["exp_avg"] = entries[0]["exp_avg"].clone()
    entries[0]["exp_avg"][0] = float("nan")
    state["optimizer_state_dict"] = {**state["optimizer_state_dict"], "state": entries}
    SCENARIOS["bf16"].train(engine, range(2, 4))
    with pytest.raises(StateError) as caught:
        engine.optimizer.load_state_dict({torch.distributed.get_rank(): state})
    hidden = not any(flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat)
    engine.load_checkpoint(folder, tag="good")
    again = engine.optimizer.state_digests() == good
    end(engine)
    return str(caught.value), hidden, again


def test_a_damaged_moment_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for message, hidden, again in two_ranks.run(load_damaged, str(tmp_path)):
        assert "exp_avg" in message and "load an undamaged one" in message
        assert hidden and again
