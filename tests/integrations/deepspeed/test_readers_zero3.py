"""Every reader and writer of parameters, masters, moments or gradients meets the values of the last finished step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, OFFLOADED, Scenario
from tests.support.deepspeed.training import OURS, end, run_steps

pytestmark = pytest.mark.in_turn("readers zero3")

EAGER = {"speculation": "always"}
LATER = {"speculation": "always", "delivery": "on_demand"}
WAITING = {"speculation": "never"}
WAITING_LATER = {**WAITING, "delivery": "on_demand"}  # every step is outstanding when step() returns


def _params(engine: Any) -> list[Any]:
    return list(engine.module.parameters())


def _gathered(engine: Any) -> list[Tensor]:
    import deepspeed

    found = []
    for param in _params(engine):
        with deepspeed.zero.GatheredParameters([param]):
            found.append(param.detach().clone())
    return found


def _gathered_at_once(engine: Any) -> list[Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(_params(engine)):
        return [param.detach().clone() for param in _params(engine)]


def _masters(engine: Any) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(param) for param in _params(engine)]


def _state(engine: Any) -> list[Tensor]:
    """Masters and moments, by each of DeepSpeed's ways."""
    from deepspeed.utils import safe_get_full_optimizer_state, safe_get_local_optimizer_state

    found = [safe_get_full_optimizer_state(param, "exp_avg") for param in _params(engine)]
    found += [safe_get_local_optimizer_state(param, "exp_avg_sq").clone() for param in _params(engine)]
    state = engine.optimizer.state_dict()
    moments = [value for entry in state["optimizer_state_dict"]["state"].values() for value in entry.values()]
    return found + [torch.as_tensor(value).detach().clone() for value in [*state["fp32_flat_groups"], *moments]]


def _sixteen_bit(engine: Any) -> list[Tensor]:
    state = engine._zero3_consolidated_16bit_state_dict()
    return [] if state is None else [value.clone() for value in state.values()]


def _evaluated(engine: Any) -> list[Tensor]:
    engine.eval()
    with torch.no_grad():
        loss = engine(99)
    engine.train()
    return [loss]


def _moved(engine: Any) -> list[Tensor]:
    """DeepSpeed's state offload of the published parameters, and back."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    from superoffload.integrations.deepspeed.zero.stage3 import numel_here

    engine.optimizer.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
    group = engine.optimizer.dp_process_group
    moved = [param.ds_tensor[: numel_here(param, group)].clone() for param in _params(engine)]  # without padding
    engine.optimizer.reload_states()
    return [*moved, *_gathered(engine)]


READERS = {
    "gathered": _gathered,
    "gathered at once": _gathered_at_once,
    "masters": _masters,
    "state": _state,
    "16 bit": _sixteen_bit,
    "evaluated": _evaluated,
    "moved": _moved,
}


def read_after_steps(options: dict[str, Any], threshold: int) -> tuple[dict[str, Any], list[bool]]:
    """What each reader sees after each of two steps, and whether something was not delivered yet when it looked."""
    scenario = Scenario({"clip": CLIP_SOME, "zero": {"stage3_param_persistence_threshold": threshold}})
    engine = scenario.engine(OURS, options)
    seen: dict[str, Any] = {}
    outstanding: list[bool] = []
    scenario.train(engine, range(3))  # in which the rank checks read everything
    for index, (name, read) in enumerate(READERS.items()):
        if name == "moved" and version("deepspeed").startswith("0.18."):
            continue  # DeepSpeed before 0.19 moves state of its own FusedAdam only
        for step in (2 * index + 3, 2 * index + 4):
            scenario.train(engine, range(step, step + 1))
            outstanding.append(bool(engine.optimizer.parts.driver.engine.last_step.is_landing))
            seen[f"{name}, step {step}"] = [value.clone() for value in read(engine)]
    end(engine)
    return seen, outstanding


@pytest.mark.parametrize("threshold", [0, 3000])
def test_readers_see_fresh_values(threshold: int, two_ranks: Ranks) -> None:
    eager = two_ranks.run(read_after_steps, EAGER, threshold)
    later = two_ranks.run(read_after_steps, WAITING_LATER, threshold)
    for (expected, waited), (found, outstanding) in zip(eager, later, strict=True):
        assert not any(waited)
        assert all(outstanding), "nothing was outstanding, so nothing was tested"
        for name, values in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(values, found[name], strict=True)), name


def test_before_0_19_8_parameters_are_gathered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking gather of several waited for the last of them only, and gloo ends them in any order."""
    import deepspeed

    from superoffload.integrations.deepspeed.partitions import Readers, gathers_wait_for_the_last_only

    for release, waits_for_last in (("0.18.0", True), ("0.19.7+cpu", True), ("0.19.8", False), ("0.20.0", False)):
        monkeypatch.setattr(deepspeed, "__version__", release)
        assert gathers_wait_for_the_last_only() == waits_for_last
    monkeypatch.setattr(deepspeed, "__version__", "0.19.7")
    calls: list[tuple[list[Any], bool]] = []

    class Partitioned:
        ds_id = 0
        partition = all_gather_coalesced = None

        def all_gather(self, param_list: Any = None, async_op: bool = False) -> None:
            calls.append((param_list, async_op))

    one, other = Partitioned(), Partitioned()
    readers = Readers([one, other], before_use=None, after_update=lambda params: None)
    one.all_gather()
    one.all_gather(param_list=[one, other])
    one.all_gather([one, other], async_op=True)
    assert calls == [([one], False), ([one], False), ([other], False), ([one, other], True)]
    readers.close()
    assert one.all_gather == Partitioned.all_gather.__get__(one), "unwrapped"


def change(engine: Any, what: str) -> None:
    from deepspeed import utils

    optimizer = engine.optimizer
    even = [param for param in _params(engine) if param.ds_numel % 2 == 0]  # DeepSpeed cannot set padded ones
    param = even[0]
    match what:
        case "master":
            utils.safe_set_full_fp32_param(param, torch.full(param.ds_shape, 0.25))
        case "moment":
            utils.safe_set_full_optimizer_state(param, torch.full(param.ds_shape, 0.5), "exp_avg_sq")
        case "gradient":
            utils.safe_set_full_grad(param, 2 * utils.safe_get_full_grad(param))
        case "gradients":
            optimizer.update_fp32_grad_for_param_vectorized(lambda grad, _: grad * 0.5, even)
        case "hyper-parameters":
            optimizer.param_groups[0].update(lr=7e-3, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-6)
        case "zero_grad":
            optimizer.zero_grad()
        case "masters from parameters":
            optimizer.refresh_fp32_params()
        case "state_dict":
            optimizer.state_dict()


def write_in_the_window(what: str, options: dict[str, Any], dtype: str | None) -> tuple[dict[str, str], float]:
    """Between backward and step, when buckets are speculated, a user writes; then trains on."""
    more = {"data_types": {"grad_accum_dtype": dtype}} if dtype else {}
    scenario = Scenario({"clip": CLIP_SOME, **more})
    engine = scenario.engine(OURS, options)

    def write(engine: Any, step: int) -> None:
        if step != 3:  # before, journals overflow
            return
        for bucket in engine.optimizer.parts.driver.engine.buckets:  # until it is in masters and moments
            assert bucket.running is None or bucket.running.wait(60.0)
        stats = engine.optimizer.stats()
        over = sum(stats[f"buckets_{fate}"] for fate in ("committed", "replayed", "undone"))
        assert (stats["buckets_speculated"] > over) == (options["speculation"] == "always"), "nothing was speculated"
        change(engine, what)

    record = run_steps(engine, range(5), loss_of=scenario.loss_of, before_step=write)
    digests = engine.optimizer.state_digests()
    end(engine)
    return digests, record["norms"][3]


@pytest.fixture(scope="module")
def untouched(two_ranks: Ranks) -> Callable[[str | None], list[Any]]:
    """The run without writes, of each data type; trained once."""
    return cache(lambda dtype: two_ranks.run(write_in_the_window, "nothing", WAITING, dtype))


WRITES = ("master", "moment", "gradient", "gradients", "hyper-parameters", "zero_grad", "masters from parameters")


@pytest.mark.parametrize("what", [*WRITES, "state_dict"])
def test_writes_before_the_step_count(
    what: str, two_ranks: Ranks, untouched: Callable[[str | None], list[Any]]
) -> None:
    dtype = "fp32" if what == "gradients" else None
    alone = untouched(dtype)
    waiting = two_ranks.run(write_in_the_window, what, WAITING, dtype)
    for options in (EAGER, LATER):
        assert two_ranks.run(write_in_the_window, what, options, dtype) == waiting
    assert (waiting[0][0] != alone[0][0]) == (what in WRITES)
    if what == "gradients":
        assert 0.5 * alone[0][1] < waiting[0][1] < 0.95 * alone[0][1]
    if what == "zero_grad":
        assert waiting[0][1] == 0.0


def write_published(options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], dict[str, str]]:
    """``GatheredParameters(modifier_rank=0)`` after training began."""
    import deepspeed

    scenario = Scenario({"clip": CLIP_SOME})
    engine = scenario.engine(OURS, options)
    scenario.train(engine, range(3))
    before = _masters(engine)
    param = _params(engine)[0]
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            param.data.view(-1)[:5] = 0.375
    after = _masters(engine)
    scenario.train(engine, range(3, 5))
    digests = engine.optimizer.state_digests()
    end(engine)
    return [value.clone() for value in before], [value.clone() for value in after], digests


@pytest.mark.parametrize("form", [{}, {"master_dtype": "split", "state_dtype": "8bit"}], ids=["fp32", "8bit+split"])
def test_a_written_parameter_is_not_reverted(form: dict[str, Any], two_ranks: Ranks) -> None:
    eager = two_ranks.run(write_published, {**EAGER, **form})
    later = two_ranks.run(write_published, {**LATER, **form})
    for before, after, _ in eager:
        assert torch.equal(after[0].view(-1)[:5], torch.full((5,), 0.375))
        assert torch.equal(after[0].view(-1)[5:], before[0].view(-1)[5:]), "untouched elements keep their extra bits"
        assert all(torch.equal(a, b) for a, b in zip(after[1:], before[1:], strict=True))
    assert [rank[2] for rank in eager] == [rank[2] for rank in later]


# ---- parameters in host memory ("offload_param"), which a speculated step writes where they are ----------------------

gathers_before_step = pytest.mark.skipif(
    find_spec("deepspeed") is not None and version("deepspeed").startswith("0.18."),
    reason="needs DeepSpeed 0.19: older ones cannot gather a first layer's parameters between backward and step()",
)


def use_in_place(
    options: dict[str, Any], zero: dict[str, Any], precision: str
) -> tuple[dict[str, list[Tensor]], Any, Any]:
    """A program reads and writes parameters while a step is speculated, writes a master, and has steps skipped."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    infinite = (0, 0, float("inf"))
    zero = {**zero, "stage3_param_persistence_threshold": 10}  # the last parameter stays gathered
    config = {"clip": CLIP_SOME, "zero": zero, "precision": precision}
    scenario = Scenario(config, groups=True, poison={4: infinite, 6: infinite})
    engine = scenario.engine(OURS, options)
    scenario.train(engine, range(3))  # the first steps are checked in full
    seen = {"before": _gathered(engine)}
    engine.backward(scenario.loss_of(engine, 3, 0))
    for bucket in engine.optimizer.parts.driver.engine.buckets:  # until it is in the partitions
        assert bucket.running is None or bucket.running.wait(60.0)
    seen["kept"] = [_params(engine)[6].detach().clone()]  # which is not gathered for it
    seen["amid"] = _gathered(engine)
    engine.step()
    seen["stepped"] = _gathered(engine)
    scenario.train(engine, range(4, 5))
    seen["skipped"] = _gathered(engine)
    with deepspeed.zero.GatheredParameters([_params(engine)[6]], modifier_rank=0):
        _params(engine)[6].data.fill_(0.625)
        engine.backward(scenario.loss_of(engine, 5, 0))
    with deepspeed.zero.GatheredParameters([_params(engine)[5]], modifier_rank=0):
        _params(engine)[5].data.view(-1)[:5] = 0.375
    engine.optimizer.zero_grad()
    seen["written"] = _gathered(engine)
    safe_set_full_fp32_param(_params(engine)[3], torch.full((40, 50), 0.1))
    scenario.train(engine, range(6, 7))
    seen["apart"] = _gathered(engine)
    scenario.train(engine, range(7, 9))
    found = seen, engine.optimizer.state_digests(), engine.optimizer.stats()
    end(engine)
    return found


@gathers_before_step
@pytest.mark.parametrize(
    ("precision", "form"),
    [
        ("bf16", {}),
        ("bf16", {"state_dtype": "8bit"}),
        ("bf16", {"master_dtype": "split"}),
        ("fp16 128", {}),
        ("fp32", {}),
    ],
)
def test_a_step_in_place_is_not_seen_before_its_verdict(precision: str, form: dict[str, Any], two_ranks: Ranks) -> None:
    expected = two_ranks.run(use_in_place, {**WAITING, **form}, {}, precision)
    for options in (EAGER, LATER, WAITING_LATER):
        found = two_ranks.run(use_in_place, {**options, **form}, OFFLOADED, precision)
        for (values, digests, stats), (others, other_digests, other_stats) in zip(expected, found, strict=True):
            for name, tensors in values.items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, others[name], strict=True)), name
            assert digests == other_digests
            if options["speculation"] == "always" and "master_dtype" not in form:
                assert other_stats["buckets_undone"] > 2, "nothing was tested"
            saved = stats["host_bytes"] - other_stats["host_bytes"]
            if options["speculation"] == "never" and not form:  # no journals
                assert saved >= 2 * 3600, "there is a second copy"
    for values, _, _ in expected:
        for one, other in (("before", "amid"), ("stepped", "skipped"), ("written", "apart")):
            assert all(torch.equal(a, b) for a, b in zip(values[one], values[other], strict=True))
        assert not torch.equal(values["before"][0], values["stepped"][0])


@gathers_before_step
def test_a_rank_alone_on_a_cpu_computes_with_the_partitions_which_no_step_writes_early() -> None:
    alone = Ranks(1)
    try:
        (expected, digests, _), (found, others, _) = (
            alone.run(use_in_place, options, zero, "bf16")[0] for options, zero in ((WAITING, {}), (EAGER, OFFLOADED))
        )
    finally:
        alone.close()
    assert digests == others
    assert all(torch.equal(a, b) for name in expected for a, b in zip(expected[name], found[name], strict=True))
