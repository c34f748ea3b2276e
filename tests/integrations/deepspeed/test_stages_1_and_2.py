"""ZeRO-1 and ZeRO-2: as stock where stock is right, as torch.optim.AdamW on all gradients where it is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.deepspeed.test_against_stock import SETTLED
from tests.support.deepspeed import scenarios
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, UNUSED, WAYS, Scenario, distance, gradients_of, reference
from tests.support.deepspeed.training import OURS, STOCK, Small, batch, config, end, make_engine, masters, run_steps

STEPS = 8
TOLERANCE = STEPS * 10 * 2.0**-24  # as in test_against_stock.py
OF_STAGE_3 = ("small sub-groups", "persistent parameters", "parameters offloaded", "parameters offloaded, not finite")
WRONG_IN_STOCK = ("two backwards",)
# DeepSpeed 0.18 steps with NaN in bf16, accumulates in bf16, and has no unmanaged accumulation.
OF_NEW_VERSIONS = (
    "fp16, dynamic scale", "bf16, not finite", "accumulation in fp32", "reduced in fp32", "unmanaged accumulation",
)  # fmt: skip
SOME_WAYS = ("stock", "match", "ours", "ours, waiting", "ours, later")


def compare(name: str, zero: dict[str, Any]) -> dict[str, Any]:
    scenario = scenarios.SCENARIOS[name]
    both = {**scenario.config.get("zero", {}), **zero}
    scenarios.SCENARIOS["this"] = replace(scenario, config={**scenario.config, "zero": both})
    return scenarios.compare("this", STEPS + 2 * (name == "clip sometimes"), SOME_WAYS)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", [name for name in scenarios.SCENARIOS if name not in (*OF_STAGE_3, *WRONG_IN_STOCK)])
def test_stock_and_ours_agree(name: str, stage: int, two_ranks: Ranks) -> None:
    if not SETTLED and name in OF_NEW_VERSIONS:
        pytest.skip("needs DeepSpeed 0.19")
    for found in two_ranks.run(compare, name, {"stage": stage}):
        stock = found["stock"]["record"]
        for way in SOME_WAYS[1:]:
            ours = found[way]["record"]
            assert (ours["applied"], ours["scales"], ours["lrs"]) == (stock["applied"], stock["scales"], stock["lrs"])
            if way == "match":
                assert ours["norms"] == stock["norms"]  # to the bit
            else:
                assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6), way
                assert found[way]["digests"] == found["ours"]["digests"], way
            if way == "match" or "dynamic" not in name:  # stock halves gradients where the loss scale grows
                assert found[way]["away"] < TOLERANCE, way
        assert not all(stock["applied"]) or "finite" not in name
        if name != "clip always":  # there, the first bucket proves the clip
            assert found["ours"]["stats"]["buckets_speculated"] > 0
        if name == "clip sometimes":
            assert found["ours"]["stats"]["buckets_committed"] and found["ours"]["stats"]["buckets_replayed"]


# ---- where stock is wrong -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """(step, micro-batch) without one parameter, and a step whose gradient of it is infinite on one rank."""

    without: tuple[tuple[int, int], ...] = ()
    accumulation: int = 1
    backwards: int = 1
    infinite: int | None = None
    managed: bool = True

    def skip(self, step: int, micro: int) -> tuple[int, ...]:
        return (UNUSED,) if (step, micro) in self.without else ()


STOCK_LAYOUTS = ("stage 1", "stage 1, overlapped", "stage 2")  # in which stock is tried too
MISTAKES = {  # of stock; in which of them
    "unused: stepped with the gradient before": (Window(((2, 0), (3, 0))), STOCK_LAYOUTS),
    "unused after an infinite gradient: NaN": (Window(((3, 0),), infinite=2), STOCK_LAYOUTS),
    "used late in the window: with the window before": (Window(tuple((s, 0) for s in range(6)), 2, 2), ("stage 2",)),
    "used early in the window: forgotten": (Window(tuple((s, 1) for s in range(6)), 2, 2), STOCK_LAYOUTS[1:]),
    "two backwards: the first one is forgotten": (Window(backwards=2), STOCK_LAYOUTS),
    "unmanaged, unused: stepped with the gradient before": (
        Window(((2, 0), (2, 1), (3, 0), (3, 1)), 2, 2, managed=False),
        STOCK_LAYOUTS,
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 1, overlapped": {"stage": 1, "overlap_comm": True},
    "stage 2, overlapped": {"stage": 2, "overlap_comm": True, "contiguous_gradients": False},
    "stage 2, round robin": {"stage": 2, "round_robin_gradients": True, "overlap_comm": True},
    "stage 2, reduced one by one": {"stage": 2, "use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 1000},
}


def train_with_gaps(way: str, case: str, layout: str) -> tuple[dict[str, Tensor], list[bool]]:
    window, applied = MISTAKES[case][0], []
    settings = {"precision": "fp32", "clip": CLIP_SOME, "accumulation": window.accumulation, "zero": LAYOUTS[layout]}
    settings["managed_gradient_accumulation"] = window.managed
    engine = Scenario(settings).engine(*WAYS[way])
    for step in range(6):
        poison = {UNUSED: math.inf} if step == window.infinite and torch.distributed.get_rank() == 1 else None
        for micro in range(window.backwards):
            engine.backward(engine(step, micro, window.skip(step, micro), poison))
            if micro == window.backwards - 1 or (window.managed and window.accumulation > 1):
                engine.step()
        applied.append(bool(engine.was_step_applied()))
    found = masters(engine)
    if way != "stock":
        for name, param in engine.module.named_parameters():
            assert torch.equal(found[name], param), "a rank has other parameters than masters"
    end(engine)
    return found, applied


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", MISTAKES)
def test_windows_that_stock_gets_wrong(case: str, layout: str, two_ranks: Ranks) -> None:
    window, wrong_in = MISTAKES[case]
    if not window.managed and (layout == "stage 1, overlapped" or not SETTLED):
        return  # DeepSpeed refuses it
    micros = range(window.backwards)
    windows = [[gradients_of(step, micro, window.skip(step, micro)) for micro in micros] for step in range(6)]
    skipped = set() if window.infinite is None else {window.infinite}
    expected = reference(windows, window.accumulation, CLIP_SOME, skip=skipped)
    for way in ("ours", "ours, later"):
        found, applied = two_ranks.run(train_with_gaps, way, case, layout)[0]
        assert [step for step in range(6) if not applied[step]] == list(skipped), way
        assert distance(expected, found) < 1e-4, way
    if SETTLED and layout in STOCK_LAYOUTS:
        found, _ = two_ranks.run(train_with_gaps, "stock", case, layout)[0]
        is_right = distance(expected, found) < 1e-4
        assert is_right == (layout not in wrong_in), "what is said about stock holds no more"


def train_one_parameter(way: str) -> dict[str, Tensor]:
    """The first rank has all of its state, so the other one gets no gradient for anything that it steps."""
    engine = Scenario({"precision": "fp32", "clip": CLIP_SOME, "zero": {"stage": 2}}).engine(*WAYS[way])
    for step in range(3):
        engine.backward(engine(step, 0, range(1, 7)))
        engine.step()
    found = masters(engine)
    end(engine)
    return found


def test_a_rank_without_gradients_steps_with_zeros(two_ranks: Ranks) -> None:
    windows = [[gradients_of(step, 0, tuple(range(1, 7)))] for step in range(3)]
    expected = reference(windows, 1, CLIP_SOME)
    for found in two_ranks.run(train_one_parameter, "ours"):
        assert distance(expected, found) < 1e-4


def train_with_no_sync(way: str) -> dict[str, Tensor]:
    """A backward that reduces nothing, one that reduces the sum, and a learning rate that changes."""
    engine = Scenario({"precision": "fp32", "clip": CLIP_SOME, "zero": {"stage": 1}}).engine(*WAYS[way])
    for step in range(6):
        with engine.no_sync():
            engine.backward(engine(step, 0))
        engine.backward(engine(step, 1))
        engine.step()
        engine.optimizer.set_lr(3e-3 / (step + 2))
    found = masters(engine)
    end(engine)
    return found


def test_no_sync(two_ranks: Ranks) -> None:
    expected, found = (two_ranks.run(train_with_no_sync, way)[0] for way in ("stock", "ours"))
    assert distance(expected, found) < TOLERANCE


# ---- parameters and state that a program writes ---------------------------------------------------------------------


def writes(options: dict[str, Any], on_host: bool) -> None:
    """Masters follow parameters that a program writes, whatever way; a master that it sets is published."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    from superoffload.integrations.deepspeed.zero.stage1_and_2 import Writes

    engine = Scenario({"zero": {"stage": 2}}).engine(OURS, {"speculation": "always", **options})
    engine.optimizer.writes = Writes(engine.optimizer.parts.layout, on_host=on_host)
    params = dict(engine.module.named_parameters())

    def step(number: int, write: Any = lambda: None) -> None:
        engine.backward(engine(number))
        write()
        engine.step()

    def by_data() -> None:
        params["dots.0.weight"].data.fill_(0.5)

    def by_version() -> None:
        with torch.no_grad():
            params["dots.3.weight"].mul_(3.0)

    step(0)
    step(1)
    untouched = safe_get_full_fp32_param(params["dots.5.weight"]).clone()
    by_data()
    step(2, by_version)  # after backward, so what was speculated is undone
    assert (safe_get_full_fp32_param(params["dots.0.weight"]) - 0.5).abs().max() < 0.02
    assert (params["dots.0.weight"] - 0.5).abs().max() < 0.02
    assert params["dots.3.weight"].abs().max() > 0.2
    moved = (safe_get_full_fp32_param(params["dots.5.weight"]) - untouched).abs().max()
    assert 0.0 < moved < 0.02  # not rounded to the published value
    assert engine.optimizer.stats()["buckets_undone"] > 0
    safe_set_full_fp32_param(params["dots.4.weight"], torch.full((7, 11, 13), 2.0))
    params["dots.0.weight"].data.fill_(-0.5)
    params["dots.6.weight"].data.fill_(1.0)  # of the rank that has the master
    step(3)
    assert (params["dots.4.weight"] - 2.0).abs().max() < 0.03
    assert (params["dots.0.weight"] + 0.5).abs().max() < 0.02
    end(engine)


def stock_reverts_writes() -> None:
    engine = Scenario({"zero": {"stage": 2}}).engine(STOCK, None)
    param = next(iter(engine.module.parameters()))
    param.data.fill_(0.5)
    engine.backward(engine(0))
    engine.step()
    assert (param - 0.5).abs().max() > 0.1
    end(engine)


def gradients() -> None:
    """Gradients that a program reads and replaces between backward and step."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = Scenario({"zero": {"stage": 1}, "precision": "fp32"}).engine(OURS, {"speculation": "always"})
    params = dict(engine.module.named_parameters())
    mean = gradients_of(0, 0)
    engine.backward(engine(0))
    for index, param in enumerate(params.values()):
        assert torch.allclose(safe_get_full_grad(param), mean[index], rtol=1e-5, atol=1e-9)
    before = masters(engine)
    for param in params.values():
        safe_set_full_grad(param, torch.zeros(param.shape))
    engine.step()
    assert engine.get_global_grad_norm() == 0.0
    for name, value in masters(engine).items():  # weight decay alone
        assert torch.allclose(value, before[name] * (1 - 3e-3 * 0.1), rtol=1e-6)
    end(engine)


def ended() -> None:
    """An engine that was destroyed has no state, and its parameters stay readable."""
    from superoffload.errors import StateError

    engine = make_engine(config(OURS, zero={"stage": 2}, options={"master_dtype": "split"}), Small())
    run_steps(engine, range(2))
    optimizer = engine.optimizer
    mappings = [param._hp_mapping for param in engine.module.parameters() if param._hp_mapping is not None]
    assert mappings and all(mapping.hp_fragment is None for mapping in mappings), "fp32 masters have memory"
    assert not optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    assert all(flat.grad is None for flat in optimizer.single_partition_of_fp32_groups)
    before = {name: param.clone() for name, param in engine.module.named_parameters()}
    end(engine)
    assert not optimizer.single_partition_of_fp32_groups and not optimizer.optimizer.state
    assert all(torch.equal(param, before[name]) for name, param in engine.module.named_parameters())
    with pytest.raises(StateError, match="was destroyed"):
        optimizer.stats()


def abandoned() -> None:
    """zero_grad() without a step drops the window."""
    engine = make_engine(config(OURS, zero={"stage": 2}, options={"speculation": "always"}))
    run_steps(engine, range(3))
    before = engine.optimizer.state_digests()
    engine.backward(engine(*batch(7)))
    engine.optimizer.zero_grad()
    assert engine.optimizer.state_digests() == before
    run_steps(engine, range(3, 5))
    found = engine.optimizer.state_digests()
    end(engine)
    engine = make_engine(config(OURS, zero={"stage": 2}))
    run_steps(engine, range(5))
    assert engine.optimizer.state_digests() == found
    end(engine)


def of_size_zero() -> None:
    """A parameter without elements, in the same group as the others."""
    model = Small()
    model.nothing = torch.nn.Parameter(torch.empty(0, 3))
    engine = make_engine(config(OURS, zero={"stage": 2}, clip=1.0), model)
    assert all(run_steps(engine, range(3))["applied"])
    end(engine)


def taken_over() -> None:
    """``enable(take_over=True)`` also runs configs with DeepSpeed's own device, also by its old name."""
    import superoffload.integrations.deepspeed as ours

    def kind(**zero: Any) -> str:
        configuration = config(STOCK, zero=zero)
        if "cpu_offload" in zero:
            del configuration["zero_optimization"]["offload_optimizer"]
        engine = make_engine(configuration, Small())
        found = type(engine.optimizer).__name__
        run_steps(engine, range(1))
        end(engine)
        return found

    assert kind(stage=2) == "DeepSpeedZeroOptimizer"
    ours.enable(take_over=True)
    try:
        assert [kind(stage=stage) for stage in (1, 2, 3)] == ["SpeculativeStage1And2"] * 2 + ["SpeculativeStage3"]
        assert kind(stage=2, cpu_offload=True) == "SpeculativeStage1And2"
    finally:
        ours.disable()
    assert kind(stage=2) == "DeepSpeedZeroOptimizer"


@pytest.mark.parametrize(
    "case",
    [stock_reverts_writes, gradients, ended, abandoned, of_size_zero, taken_over],
    ids=lambda case: case.__name__,
)
def test_what_each_rank_checks(case: Any, two_ranks: Ranks) -> None:
    two_ranks.run(case)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("options", [{}, {"delivery": "on_demand", "master_dtype": "split", "state_dtype": "8bit"}])
def test_writes_of_a_program(options: dict[str, Any], on_host: bool, two_ranks: Ranks) -> None:
    two_ranks.run(writes, options, on_host)
