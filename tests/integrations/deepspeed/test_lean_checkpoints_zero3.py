"""Checkpoints of leaner state under ZeRO-3, exchanged with other forms and with stock; test_checkpoints_zero3.py
resumes them to the bit and has DeepSpeed's tools read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from superoffload.errors import StateError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, FORMS, WAYS, Scenario
from tests.support.deepspeed.training import end, masters
from tests.support.reference import eight_bit

pytestmark = pytest.mark.in_turn("lean checkpoints zero3")

MOMENTS = {"exp_avg": eight_bit.EXP_AVG, "exp_avg_sq": eight_bit.EXP_AVG_SQ}
State = dict[str, list[Tensor]]


SCENARIO = Scenario({"clip": CLIP_SOME, "zero": {"sub_group_size": 2000}})


def engine_of(form: str) -> Any:
    offload, options = WAYS["stock" if form == "stock" else "ours"]
    return SCENARIO.engine(offload, None if options is None else {**options, **FORMS[form]})


def partitions(engine: Any) -> State:
    """This rank's partitions of moments, and the masters, as DeepSpeed's own helpers read them."""
    from deepspeed.utils import safe_get_local_optimizer_state

    params = list(engine.module.parameters())
    rank = torch.distributed.get_rank()
    found: State = {"master": list(masters(engine).values())}
    for name in MOMENTS:
        parts = [safe_get_local_optimizer_state(param, name) for param in params]
        sizes = [min(max(0, p.ds_numel - rank * len(part)), len(part)) for p, part in zip(params, parts, strict=True)]
        found[name] = [part[:numel].float().clone() for part, numel in zip(parts, sizes, strict=True)]
    return found


def saved_and_loaded(folder: str, first: str, then: str) -> tuple[State, State]:
    engine = engine_of(first)
    SCENARIO.train(engine, range(3))
    engine.save_checkpoint(folder, tag="saved")
    saved = partitions(engine)
    end(engine)
    engine = engine_of(then)
    SCENARIO.train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="saved")
    loaded = partitions(engine)
    end(engine)
    return saved, loaded


def as_stored(value: Tensor, name: str, form: str) -> Tensor:
    """What a form keeps of a moment that it loads."""
    if "8bit" in form and value.numel():
        codes = eight_bit.written(value.numpy(), MOMENTS[name])
        return torch.from_numpy(np.array(eight_bit.read(codes, value.numel(), MOMENTS[name])))
    return value.bfloat16().float() if "bf16" in form else value


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("stock", "8bit+split"),
        ("8bit+split", "stock"),
        ("split", "bf16"),
    ],
)
def test_forms_load_each_other(first: str, then: str, two_ranks: Ranks, tmp_path: Path) -> None:
    for theirs, ours in two_ranks.run(saved_and_loaded, str(tmp_path), first, then):
        assert all(torch.equal(a, b) for a, b in zip(theirs["master"], ours["master"], strict=True))
        for name in MOMENTS:
            assert any(len(value) > eight_bit.BLOCK for value in ours[name])
            for saved, value in zip(theirs[name], ours[name], strict=True):
                assert torch.equal(value, as_stored(saved, name, then))


def published_at_ties(folder: str) -> None:
    """Masters half-way between two bf16 values, which DeepSpeed's own load would round to the even one."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    engine = engine_of("split")
    SCENARIO.train(engine, range(2))
    param = next(engine.module.parameters())
    bits = (torch.arange(param.ds_numel, dtype=torch.int32) << 16) + 0x3C008000
    safe_set_full_fp32_param(param, bits.view(torch.float32).view(param.ds_shape))
    engine.save_checkpoint(folder, tag="saved")
    engine.load_checkpoint(folder, tag="saved")
    with deepspeed.zero.GatheredParameters([param]):
        found = param.detach().flatten().view(torch.int16).to(torch.int32)
    expected = (bits + 0x8000) >> 16
    assert int((expected & 1).sum()) > 100
    assert torch.equal(found, expected)
    end(engine)


def test_a_load_publishes_ties_as_a_step_does(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(published_at_ties, str(tmp_path))


def load_damaged(folder: str) -> None:
    """A NaN in a moment; what is there afterwards, and that a good checkpoint still loads."""

    def shown() -> bool:
        return any(flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat)

    engine = engine_of("8bit+split")
    SCENARIO.train(engine, range(2))
    engine.save_checkpoint(folder, tag="good")
    good = engine.optimizer.state_digests()
    with engine.optimizer.parts.saved_state.writing_masters():  # masters that are left alone keep their bits
        assert shown()
    assert engine.optimizer.state_digests() == good
    state = engine.optimizer.state_dict()
    entries = {key: dict(entry) for key, entry in state["optimizer_state_dict"]["state"].items()}
    entries[0]["exp_avg"] = entries[0]["exp_avg"].clone()
    entries[0]["exp_avg"][0] = float("nan")
    state["optimizer_state_dict"] = {**state["optimizer_state_dict"], "state": entries}
    SCENARIO.train(engine, range(2, 4))
    with pytest.raises(StateError, match=r"exp_avg.*load an undamaged one"):
        engine.optimizer.load_state_dict({torch.distributed.get_rank(): state})
    assert not shown()
    engine.load_checkpoint(folder, tag="good")
    assert engine.optimizer.state_digests() == good
    end(engine)


def test_a_damaged_moment_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(load_damaged, str(tmp_path))
