"""Checkpoints: resumed to the bit, exchanged with stock ZeRO-Offload and other forms, read by DeepSpeed's tools."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from superoffload.errors import StateError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, FORMS, WAYS, Scenario, distance
from tests.support.deepspeed.training import end, masters
from tests.support.reference import eight_bit

SCENARIOS = {
    "bf16": Scenario({"clip": CLIP_SOME, "zero": {"sub_group_size": 2000}}),
    "groups": Scenario({"clip": CLIP_SOME}, groups=True),
    "fp16": Scenario({"precision": "fp16", "clip": CLIP_SOME}),
    "stage 1": Scenario({"clip": CLIP_SOME, "zero": {"stage": 1}}),
    "stage 2": Scenario({"clip": CLIP_SOME, "zero": {"stage": 2}}),
    "stage 2, groups": Scenario({"clip": CLIP_SOME, "zero": {"stage": 2, "round_robin_gradients": True}}, groups=True),
}


def make_engine(scenario: Scenario, way: str, form: str = "fp32") -> Any:
    offload, options = WAYS[way]
    return scenario.engine(offload, None if options is None else {**options, **FORMS[form]})


def outcome(engine: Any, record: dict[str, Any]) -> Any:
    """Masters, digests (of ours), and what was recorded. Digests are also of what a checkpoint would hold now, which is
    not the state of the checkpoint that was loaded."""
    found = {name: value.cpu() for name, value in masters(engine).items()}
    digests = None
    if type(engine.optimizer).__name__.startswith("Speculative"):
        state = engine.optimizer.state_dict()
        inner, saved_masters = ("optimizer_state_dict", "fp32_flat_groups")
        if inner not in state:  # of stages 1 and 2
            inner, saved_masters = ("base_optimizer_state", "single_partition_of_fp32_groups")
        entries = state[inner]["state"].values()
        held = [*state[saved_masters], *(entry[name] for entry in entries for name in ("exp_avg", "exp_avg_sq"))]
        parts = [tensor.detach().float().numpy().tobytes() for tensor in held]
        digests = (engine.optimizer.state_digests(), hashlib.sha256(b"".join(parts)).hexdigest())
    end(engine)
    return found, digests, record


def straight_and_resumed(
    name: str, first: str, then: str, folder: str, saved: int, form: str = "fp32", **options: Any
) -> tuple[Any, Any]:
    """A run that was saved on its way, and its end reached from there by a new engine, trained on something else."""
    scenario = SCENARIOS[name]
    engine = make_engine(scenario, first, form)
    scenario.train(engine, range(saved))
    engine.save_checkpoint(folder, tag="saved")
    straight = outcome(engine, scenario.train(engine, range(saved, saved + 4)))
    engine = make_engine(scenario, then, form)
    scenario.train(engine, range(50, 53))
    if then != "stock":  # a window in flight, which stock would add to the next one
        engine.backward(scenario.loss_of(engine, 60, 0))
    path, _ = engine.load_checkpoint(folder, tag="saved", **options)
    assert path is not None
    steps = range(0) if options else range(saved, saved + 4)
    return straight, outcome(engine, scenario.train(engine, steps))


@pytest.mark.parametrize(
    ("scenario", "way", "form", "saved"),
    [
        ("fp16", "ours", "fp32", 4),
        ("bf16", "ours, later", "split", 4),
        ("groups", "ours", "bf16", 4),
        ("groups", "ours, later", "8bit", 4),
        ("bf16", "ours", "8bit+split", 0),
        ("stage 1", "ours, later", "split", 4),
        ("stage 2", "ours", "fp32", 4),
        ("stage 2", "ours", "8bit+split", 0),
        ("stage 2, groups", "ours, later", "bf16", 4),
    ],
)
def test_resume_is_bit_exact(scenario: str, way: str, form: str, saved: int, two_ranks: Ranks, tmp_path: Path) -> None:
    for (_, expected, record), (_, found, again) in two_ranks.run(
        straight_and_resumed, scenario, way, way, str(tmp_path), saved, form
    ):
        assert found == expected
        assert again == record


@pytest.mark.parametrize("scenario", ["bf16", "stage 1", "stage 2"])
@pytest.mark.parametrize(
    ("first", "then", "saved"), [("stock", "match", 4), ("match", "stock", 4), ("stock", "match", 0)]
)
def test_stock_and_ours_read_each_others(
    scenario: str, first: str, then: str, saved: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    for (expected, _, record), (found, _, again) in two_ranks.run(
        straight_and_resumed, scenario, first, then, str(tmp_path), saved
    ):
        assert distance(expected, found) < 8 * 10 * 2.0**-24
        assert again["norms"] == record["norms"]


def test_loading_weights_only(two_ranks: Ranks, tmp_path: Path) -> None:
    """Masters follow the published weights, as in stock: DeepSpeed reads no others from a checkpoint of ZeRO-3."""
    found = [
        two_ranks.run(straight_and_resumed, "bf16", "ours", then, str(tmp_path), 4, form, load_module_only=True)[0][1]
        for then, form in (("stock", "fp32"), ("ours", "fp32"), ("ours", "split"))
    ]
    for ours in found[1:]:
        assert distance(found[0][0], ours[0]) == 0.0


def padding(folder: str) -> None:
    """What is stored behind the parameters, where memory that is not written yet holds NaN, is zero: two checkpoints of
    one state are the same, to the bit."""
    from superoffload.integrations.deepspeed.zero.stage3 import numel_here

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it
    try:
        engine = SCENARIOS["bf16"].engine(*WAYS["ours"])
    finally:
        torch.use_deterministic_algorithms(False)
    for flat, params in zip(engine.optimizer.fp32_partitioned_groups_flat, engine.optimizer.fp16_groups, strict=True):
        start = 0
        for param in params:
            size, numel = param.partition_numel(), numel_here(param, engine.optimizer.dp_process_group)
            assert not flat[start + numel : start + size].any()
            start += size
    end(engine)


State = dict[str, tuple[Tensor, ...]]


def state_of(engine: Any) -> State:
    """Master and moments by name."""
    from deepspeed.utils import safe_get_full_optimizer_state

    moments = {
        name: [safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")]
        for name, param in engine.module.named_parameters()
    }
    return {name: (master, *moments[name]) for name, master in masters(engine).items()}


def save_for_tools(name: str, folder: str, form: str) -> State:
    bf16 = SCENARIOS[name].config
    zero = {**bf16["zero"], "stage3_gather_16bit_weights_on_model_save": True}
    scenario = Scenario({**bf16, "zero": zero})
    engine = make_engine(scenario, "ours, later", form)
    scenario.train(engine, range(4))
    assert engine.save_16bit_model(folder, "weights.bin")
    engine.save_checkpoint(folder, tag="saved")
    found = state_of(engine)
    end(engine)
    return found


def load_universal(name: str, folder: str, form: str) -> tuple[State, list[int]]:
    scenario = Scenario({**SCENARIOS[name].config, "checkpoint": {"load_universal": True}})
    engine = make_engine(scenario, "ours", form)
    scenario.train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="universal")
    if name == "stage 2" and form == "fp32":
        for full, param in zip(masters(engine).values(), engine.module.parameters(), strict=True):
            assert torch.equal(param, full.bfloat16()), "not published"
    found, steps = state_of(engine), list(engine.optimizer.parts.driver.steps)
    scenario.train(engine, range(4, 6))  # trains on
    end(engine)
    return found, steps


def make_universal(folder: Path) -> None:
    """Converts the checkpoint ``saved`` to ``universal``, with DeepSpeed's own tool."""
    from deepspeed.checkpoint import ds_to_universal

    folders = {"input_folder": str(folder / "saved"), "output_folder": str(folder / "universal")}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    others = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with mock.patch.object(sys, "argv", sys.argv):  # the tool changes it
        ds_to_universal.main(argparse.Namespace(**folders, **workers, **others))


@pytest.mark.parametrize("name", ["bf16", "stage 2"])
def test_deepspeeds_tools(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """Weights in 16 bit and in fp32, and universal checkpoints, which another number of ranks loads."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    one_rank = Ranks(1)
    try:
        for form in ("fp32", "8bit+split"):
            folder = tmp_path / form[:4]  # DeepSpeed's tool cannot parse a path with "+"
            expected = two_ranks.run(save_for_tools, name, str(folder), form)[0]
            halves = torch.load(folder / "weights.bin")
            consolidated = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="saved")
            make_universal(folder)
            found, steps = one_rank.run(load_universal, name, str(folder), form)[0]
            assert set(consolidated) == set(expected)
            assert set(steps) == {4}
            for param, (master, *moments) in expected.items():
                assert torch.equal(consolidated[param].float(), master)
                assert form != "fp32" or torch.equal(halves[param], master.bfloat16())  # ties: away from zero if split
                assert torch.equal(found[param][0], master)
                if form == "fp32":  # others are rounded anew, in blocks of another partition
                    assert all(torch.equal(a, b) for a, b in zip(found[param][1:], moments, strict=True))
    finally:
        one_rank.close()


# ---- leaner state, exchanged with other forms ------------------------------------------------------------------------

MOMENTS = {"exp_avg": eight_bit.EXP_AVG, "exp_avg_sq": eight_bit.EXP_AVG_SQ}
Partitions = dict[str, list[Tensor]]
lean = pytest.mark.in_turn("lean checkpoints zero")


def engine_of(form: str, name: str = "bf16") -> Any:
    return make_engine(SCENARIOS[name], *(("stock",) if form == "stock" else ("ours", form)))


def here(param: Any, whole: Tensor) -> Tensor:
    """This rank's part."""
    if hasattr(param, "ds_id"):  # of ZeRO-3
        size = param.ds_tensor.numel()
        return whole.flatten()[torch.distributed.get_rank() * size :][:size].clone()
    if param._hp_mapping is None:
        return whole.flatten()[:0]
    part = param._hp_mapping.lp_fragment_address
    return whole.flatten()[part.start : part.start + part.numel].clone()


def partitions(engine: Any) -> Partitions:
    """This rank's partitions of moments, and the masters, as DeepSpeed's own helpers read them."""
    from deepspeed.utils import safe_get_full_optimizer_state

    params = list(engine.module.parameters())
    found: Partitions = {"master": list(masters(engine).values())}
    for name in MOMENTS:
        found[name] = [here(param, safe_get_full_optimizer_state(param, name).float()) for param in params]
    return found


def saved_and_loaded(name: str, folder: str, first: str, then: str) -> tuple[Partitions, Partitions]:
    engine = engine_of(first, name)
    SCENARIOS["bf16"].train(engine, range(3))
    engine.save_checkpoint(folder, tag="saved")
    saved = partitions(engine)
    end(engine)
    engine = engine_of(then, "stage 2" if name == "stage 1" else name)
    SCENARIOS["bf16"].train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="saved")
    if then == "stock" and name != "bf16":  # DeepSpeed's own readers of stages 1 and 2 fail between a load and a step
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    loaded = partitions(engine)
    end(engine)
    return saved, loaded


def as_stored(value: Tensor, name: str, form: str) -> Tensor:
    """What a form keeps of a moment that it loads."""
    if "8bit" in form and value.numel():
        codes = eight_bit.written(value.numpy(), MOMENTS[name])
        return torch.from_numpy(np.array(eight_bit.read(codes, value.numel(), MOMENTS[name])))
    return value.bfloat16().float() if "bf16" in form else value


@lean
@pytest.mark.parametrize("scenario", ["bf16", "stage 1"])  # of stage 1 into stage 2
@pytest.mark.parametrize(("first", "then"), [("stock", "8bit+split"), ("8bit+split", "stock"), ("split", "bf16")])
def test_forms_load_each_other(scenario: str, first: str, then: str, two_ranks: Ranks, tmp_path: Path) -> None:
    for theirs, ours in two_ranks.run(saved_and_loaded, scenario, str(tmp_path), first, then):
        assert all(torch.equal(a, b) for a, b in zip(theirs["master"], ours["master"], strict=True))
        for name in MOMENTS:
            assert any(len(value) > eight_bit.BLOCK for value in ours[name])
            for saved, value in zip(theirs[name], ours[name], strict=True):
                assert torch.equal(value, as_stored(saved, name, then))


def published_at_ties(folder: str, name: str = "bf16") -> None:
    """Masters half-way between two bf16 values, which DeepSpeed's own load would round to the even one."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    engine = engine_of("split", name)
    SCENARIOS["bf16"].train(engine, range(2))
    param = next(engine.module.parameters())
    shape = getattr(param, "ds_shape", param.shape)
    bits = (torch.arange(shape.numel(), dtype=torch.int32) << 16) + 0x3C008000
    safe_set_full_fp32_param(param, bits.view(torch.float32).view(shape))
    engine.save_checkpoint(folder, tag="saved")
    engine.load_checkpoint(folder, tag="saved")
    with deepspeed.zero.GatheredParameters([param]):  # which does nothing in other stages
        found = param.detach().flatten().view(torch.int16).to(torch.int32)
    expected = (bits + 0x8000) >> 16
    assert int((expected & 1).sum()) > 100
    assert torch.equal(found, expected)
    end(engine)


def ties_in_stage_2(folder: str) -> None:
    """Every rank has all parameters: those that other ranks publish too."""
    published_at_ties(folder, "stage 2")


def load_damaged(folder: str) -> None:
    """A NaN in a moment; what is there afterwards, and that a good checkpoint still loads."""

    def shown() -> bool:
        return any(flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat)

    engine = engine_of("8bit+split")
    SCENARIOS["bf16"].train(engine, range(2))
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
    SCENARIOS["bf16"].train(engine, range(2, 4))
    with pytest.raises(StateError, match=r"exp_avg.*load an undamaged one"):
        engine.optimizer.load_state_dict({torch.distributed.get_rank(): state})
    assert not shown()
    engine.load_checkpoint(folder, tag="good")
    assert engine.optimizer.state_digests() == good
    end(engine)


@lean
@pytest.mark.parametrize(
    "case", [padding, published_at_ties, ties_in_stage_2, load_damaged], ids=lambda case: case.__name__
)
def test_what_each_rank_checks(case: Callable[[str], None], two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(case, str(tmp_path))
