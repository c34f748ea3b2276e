"""``enable()``, ``disable()``, what configs select, and what is refused with what advice."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from superoffload.errors import ArgumentError, StateError
from superoffload.integrations.deepspeed.config import (
    Options,
    check_arguments,
    check_optimizer,
    load,
    read_options,
    rewrite,
    selects_us,
)
from superoffload.integrations.deepspeed.switch import NEWEST, OLDEST, check_version, lazy_builder
from tests.support.checkout import ROOT
from tests.support.deepspeed.ranks import RankError, Ranks
from tests.support.deepspeed.training import STOCK, Small, config, end, make_engine, run_steps

OURS = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "superoffload"}}}


def changed(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {**OURS["zero_optimization"], **zero}}


def test_what_selects_us() -> None:
    for offload in ({"device": "superoffload", "pin_memory": False}, {"device": "cpu", "super_offload": True}):
        given = {**changed(offload_optimizer=offload), "train_batch_size": 4}
        before = json.dumps(given)
        found = rewrite(given)
        assert found["zero_optimization"]["offload_optimizer"] == {**offload, "device": "cpu", "super_offload": True}
        assert found["train_batch_size"] == 4
        assert json.dumps(given) == before, "the user's own dictionary was changed"
    for device in ("cpu", "none", "nvme"):
        given = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}
        assert not selects_us(given)
        assert rewrite(given) is given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (changed(stage=0), ["stage=0", "expected 1, 2 or 3"]),
        (changed(offload_optimizer={"device": "nvme", "super_offload": True}), ["NVMe", "superoffload"]),
        (changed(offload_param={"device": "nvme"}), ["offload_param", "NVMe", '"cpu"']),
        (changed(zenflow={"topk_ratio": 0.1}), ["zenflow"]),
        (changed(zero_quantized_weights=True), ["zero_quantized_weights"]),
        (changed(zero_quantized_gradients=True), ["zero_quantized_gradients"]),
        (changed(zero_hpz_partition_size=4), ["zero_hpz_partition_size", "4"]),
        (changed(mics_shard_size=2), ["mics_shard_size", "2", "MiCS is not supported"]),
        ({**OURS, "compile": {"deepcompile": True}}, ["deepcompile", "engine.compile()"]),
        ({**OURS, "bf16": {"bf16_master_weights_and_grads": True}}, ["masters have fp32 values", '"split"']),
        ({**OURS, "hybrid_engine": {"enabled": True}}, ["hybrid_engine.enabled"]),
        (changed(zero_quantized_nontrainable_weights=True), ["zero_quantized_nontrainable_weights"]),
        (changed(elastic_checkpoint=True), ["elastic_checkpoint", "universal"]),
        ({**OURS, "bf16": {"bf16_optimizer_states": True}}, ['{"state_dtype": "bf16"} instead']),
        ({**OURS, "fp16": {"fp16_master_weights_and_grads": True}}, ["master weights are fp32"]),
        ({**OURS, "optimizer": {"type": "Lamb"}}, ["type='Lamb'", '"AdamW"', '{"device": "cpu"}']),
        ({**OURS, "superoffload": {"specullation": "always"}}, ["unknown", "specullation", "speculation"]),
        ({**OURS, "superoffload": {"speculation": "perhaps"}}, ["'perhaps'", "'adaptive'"]),
        ({**OURS, "superoffload": {"delivery": "lazy"}}, ["'lazy'", "'on_demand'"]),
        ({**OURS, "superoffload": {"threads": 0}}, ["threads=0"]),
        ({**OURS, "superoffload": {"state_dtype": "int8"}}, ["state_dtype='int8'", "'8bit'"]),
        ({**OURS, "superoffload": {"master_dtype": "bf16"}}, ["master_dtype='bf16'", "'split'"]),
        ({**OURS, "superoffload": {"seed": -1}}, ["seed=-1"]),
        ({**OURS, "superoffload": {"bucket_numel": "auto"}}, ["bucket_numel='auto'"]),
        ({**OURS, "superoffload": {"rank_timeout": 0}}, ["rank_timeout=0", "at least 0.1"]),
        ({**OURS, "superoffload": {"match_stock": 1}}, ["match_stock=1"]),
        ({**OURS, "superoffload": True}, ["expected an object"]),
        ({"zero_optimization": {"stage": 3}, "superoffload": {}}, ["nothing selects superoffload"]),
    ],
)
def test_refused(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        rewrite(given)
    for word in words:
        assert word in str(error.value)


def test_options_and_configs_as_files_and_base64(tmp_path: Path) -> None:
    assert read_options({"superoffload": {"threads": 3, "match_stock": True}}) == Options(threads=3, match_stock=True)
    text = json.dumps(OURS)
    path = tmp_path / "ds.json"
    path.write_text("# comments are allowed\n" + text)
    assert load(str(path)) == load(path) == load(base64.urlsafe_b64encode(text.encode()).decode()) == OURS
    assert load("no such file") is None
    assert load(None) is None


def test_versions() -> None:
    for version in ("0.18.0", "0.18.9", "0.19.8", "0.19.8+cu130"):
        check_version(version)
    for version in ("0.17.6", "0.19.9", "0.20.0", "1.0"):
        with pytest.raises(ArgumentError, match=r"expected 0\.18\.0 to 0\.19\.8"):
            check_version(version)
    pins = (ROOT / "requirements" / "deepspeed.txt").read_text()  # the newest and the oldest are what CI runs
    assert f"deepspeed=={'.'.join(map(str, NEWEST))}\n" in pins
    assert f"build/deepspeed-{'.'.join(map(str, OLDEST))}\n" in (ROOT / "Makefile").read_text()


def test_without_deepspeed() -> None:
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "import superoffload.integrations.deepspeed as s\n"
        "try: s.enable()\n"
        "except ValueError as e: print(e)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "deepspeed is not installed; pip install" in found.stdout


# ---- on ranks


def on_and_off() -> None:
    import deepspeed.ops.adam.cpu_adam
    import deepspeed.runtime.config
    import deepspeed.runtime.superoffload.superoffload_stage3 as upstream

    import superoffload.integrations.deepspeed as ours

    def state() -> tuple[Any, ...]:
        return (
            torch.nn.utils.clip_grad_norm_,
            torch.nn.utils.clip_grad.clip_grad_value_,
            deepspeed.runtime.config.DeepSpeedConfig.__init__,
            deepspeed.ops.adam.cpu_adam.CPUAdamBuilder,
            upstream.SuperOffloadOptimizer_Stage3,
        )

    ours.disable()
    original = state()
    ours.enable()
    ours.enable()
    assert ours.is_enabled()
    assert all(a is not b for a, b in zip(original, state(), strict=True))
    ours.disable()
    ours.disable()
    assert not ours.is_enabled() and state() == original

    engine = make_engine(config(STOCK))  # enables
    ours.disable()
    ours.enable()  # a stock engine does no harm
    ours.disable()
    engine._config.zero_config.offload_optimizer.super_offload = True  # upstream's own asserts CUDA
    with pytest.raises(StateError, match=r"call enable\(\) before deepspeed\.initialize\(\)"):
        ours.enable()
    engine.optimizer, kept = None, engine.optimizer
    ours.enable()  # initialize() raised: there is no backend that it could keep
    ours.disable()
    engine.optimizer = kept
    engine._config.zero_config.offload_optimizer.super_offload = False
    end(engine)
    engine = make_engine(config())
    ours.disable()  # an engine keeps the backend that it has
    run_steps(engine, range(2))
    assert type(engine.optimizer).__name__ == "SpeculativeStage3"
    end(engine)


def test_enable_and_disable(two_ranks: Ranks) -> None:
    two_ranks.run(on_and_off)


def initialize(configuration: dict[str, Any], optimizer: str | None = None, **arguments: Any) -> str:
    model = Small()
    if optimizer is not None:
        arguments["optimizer"] = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        del configuration["optimizer"]
    engine = make_engine(configuration, model, **arguments)
    name = type(engine.optimizer).__name__
    end(engine)
    return name


def initialize_with_experts() -> str:
    """A parameter that is partitioned over fewer ranks than the others, as those of experts are."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    original = Stage3.__init__

    def construct(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(self, module, *args, **kwargs)
        module.head.weight.ds_process_group = alone[dist.get_rank()]

    with mock.patch.object(Stage3, "__init__", construct):
        return initialize(config())


def initialize_without_a_compiler() -> str:
    from deepspeed.ops.adam import cpu_adam

    import superoffload.integrations.deepspeed as ours

    configuration = config({"device": "superoffload", "ratio": 0.5})  # on processors it changes nothing
    del configuration["optimizer"]["params"]["torch_adam"]
    ours.disable()
    with mock.patch.object(cpu_adam.CPUAdamBuilder, "load", side_effect=RuntimeError("no compiler")):
        return initialize(configuration)


def test_optimizers(two_ranks: Ranks) -> None:
    assert two_ranks.run(initialize, config(), "Adam") == ["SpeculativeStage3"] * 2
    assert two_ranks.run(initialize_without_a_compiler) == ["SpeculativeStage3"] * 2


def test_refused_at_initialize(two_ranks: Ranks) -> None:
    autocast = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "float16"}}
    split = config(precision="fp16 128", options={"master_dtype": "split"})
    refused: list[tuple[Callable[..., str], Any, str]] = [
        (initialize, ({**config(), "zero_allow_untested_optimizer": True}, "SGD"), "optimizer SGD: expected"),
        (initialize, (config(zero={"stage": 0}),), "expected 1, 2 or 3"),
        (initialize, ({**config(), "superoffload": {"speed": 1}},), "unknown.* speed"),
        (initialize, ({**config(), **autocast},), "torch_autocast.*its loss scaler"),
        (initialize, (split,), r"master_dtype='split': it needs bfloat16 parameters.*float16"),
        (initialize_with_experts, (), r"is partitioned over ranks \[0\], others over \[0, 1\]"),
    ]
    for case, arguments, words in refused:
        with pytest.raises(RankError, match=words):
            two_ranks.run(case, *arguments)
    assert two_ranks.run(initialize, config()) == ["SpeculativeStage3"] * 2  # nothing is left behind


# ---- what only arguments and optimizers of DeepSpeed say


class CPUAdam(torch.optim.Adam):
    """Stands in for DeepSpeedCPUAdam."""

    fp32_optimizer_states = True


class Own(torch.optim.AdamW):
    """May step differently."""


def test_refused_arguments_and_optimizers() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    check_arguments({"zero_hpz_partition_size": 1, "mpu": SimpleNamespace(initialize_sequence_parallel=None)})
    for allowed in (torch.optim.Adam, torch.optim.AdamW, CPUAdam):
        check_optimizer(allowed([param]), CPUAdam)
    of_16_bit = CPUAdam([param])
    of_16_bit.fp32_optimizer_states = False
    refused: list[tuple[Any, str]] = [
        ({"mpu": SimpleNamespace()}, "tensor parallelism is not supported"),
        ({"gradient_accumulation_dtype": torch.float64}, "expected fp32, bf16 or fp16"),
        ({"bf16_optimizer_states": True}, '"state_dtype": "bf16"'),  # and what is refused in the JSON already
        (torch.optim.SGD([param]), 'optimizer SGD: expected.*set "offload_optimizer": {"device": "cpu"}'),
        (Own([param]), "optimizer Own: expected"),
        (torch.optim.AdamW([param], amsgrad=True), "amsgrad=True: expected False"),
        (torch.optim.AdamW([param], maximize=True), "maximize=True: expected False"),
        (of_16_bit, '"state_dtype": "bf16"} instead'),
    ]
    for given, words in refused:
        with pytest.raises(ArgumentError, match=words):
            if isinstance(given, dict):
                check_arguments(given)
            else:
                check_optimizer(given, CPUAdam)


class Builder:
    """Stands in for DeepSpeed's, whose load() compiles."""

    built = 0

    def load(self) -> Any:
        Builder.built += 1
        return mock.Mock()


def test_the_kernel_is_built_for_the_first_who_calls_it() -> None:
    """A stock engine beside ours: its optimizer, made before the kernel was there, is known to the kernel."""
    kernel: Any = lazy_builder(Builder)().load()
    kernel.create_adam(0, 1e-3, "ours")
    kernel.create_adam(1, 1e-3, "stock")
    kernel.destroy_adam(0)
    with pytest.raises(AttributeError):
        assert kernel.__wrapped__, "who only looks at it builds nothing"
    assert Builder.built == 0
    kernel.adam_update(1, 5)
    kernel.create_adam(2, 1e-3, "later")
    kernel.destroy_adam(1)
    assert Builder.built == 1
    called = mock.call
    made = [called.create_adam(1, 1e-3, "stock"), called.adam_update(1, 5), called.create_adam(2, 1e-3, "later")]
    assert kernel._kernel.mock_calls == [*made, called.destroy_adam(1)]


def test_the_environment_and_arguments_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.integrations.deepspeed.zero.stage3 import SpeculativeStage3

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ArgumentError, match="mpu=SimpleNamespace: tensor parallelism is not supported"):
        SpeculativeStage3(None, adam, None, None, {}, mpu=SimpleNamespace())
    monkeypatch.setenv("SUPEROFFLOAD_DEVICE_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match="SUPEROFFLOAD_DEVICE_TIMEOUT='soon': expected a number"):
        SpeculativeStage3(None, None, None, None, {})
