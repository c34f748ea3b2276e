"""`superoffload plan`: sizes, memory, time and advice, and that its documentation shows what it really prints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planned_and_published as published
from superoffload.errors import ArgumentError
from superoffload.tools.cli import main
from superoffload.tools.plan.explanations import AutoPlacement, auto_placement, placement_lines
from superoffload.tools.plan.machines import GB
from superoffload.tools.plan.memory_estimate import (
    BUCKET_ELEMENTS,
    CONTEXT_BYTES,
    ENGINES,
    FRAGMENTATION,
    Settings,
    activation_bytes,
    check_fit,
    estimate_memory,
)
from superoffload.tools.plan.models import ModelShape, parse_parameter_count, read_config, typical_shape
from superoffload.tools.plan.profiles import GH200_96
from superoffload.tools.plan.settings import evaluate, largest_model
from superoffload.tools.plan.step_time import estimate_step, plain_pass_seconds
from tests.support.checkout import ROOT

LLAMA_8B = ModelShape(32, 4096, 32, 8, 14336, 128256)


# ---- against what was published ----


def test_the_documentation_shows_the_comparison_as_it_is() -> None:
    page = (ROOT / "docs/plan.md").read_text()
    shown = re.search(r"<!-- published -->\n(.*)\n<!-- /published -->", page, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == published.comparison().strip(), (
        "run python -m benchmarks.planned_and_published and put what it prints between the markers of docs/plan.md"
    )


def test_sizes_that_fit_are_the_published_ones_but_for_three() -> None:
    wrong = [
        (name, ranks)
        for name, sizes in published.LARGEST_HIDDEN.items()
        for ranks, expected in enumerate(sizes, 1)
        if published.largest_hidden(name, ranks) != expected
    ]
    assert wrong == [("stage 3", 1), ("stage 3", 2), ("stage 3", 4)]


@pytest.mark.parametrize("name", published.PEAK_GB)
def test_peaks_are_within_ten_percent_of_the_published_ones(name: str) -> None:
    settings = replace(published.CONFIGURATIONS[name], ranks=4)
    peak = estimate_memory(published.evaluated_model(4096), settings).gpu_peak
    assert peak / GB == pytest.approx(published.PEAK_GB[name], rel=0.10)


def test_offload_engines_come_out_in_the_published_order() -> None:
    rates = [published.planned_tokens_per_second(name) for name in ("stage 3 + ZeRO-Offload", "stage 3 + SuperOffload")]
    assert rates[0] < 0.8 * published.planned_tokens_per_second("stage 3") and rates[0] < rates[1]


def test_models_that_were_trained_fit() -> None:
    for _, parameters, ranks in published.LARGE_MODELS:
        for engine in ("deepspeed-superoffload", "superoffload"):
            settings = published.large_model_settings(ranks, engine)
            assert check_fit(typical_shape(parameters), GH200_96, settings).fits


def test_check_published_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--check-published"]) == 0
    assert capsys.readouterr().out.strip() == published.comparison().strip()


# ---- models ----


def test_parameters_of_a_known_model() -> None:
    """Llama 3.1 8B has 8,030,261,248 parameters, as its checkpoint's index says."""
    assert LLAMA_8B.parameters == 8_030_261_248


def test_parameters_agree_with_a_real_module() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    import torch

    from benchmarks.training.config import ModelConfig
    from benchmarks.training.model import build_model

    config = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, mlp=160, sequence=32)
    module = build_model(config, torch.float32, torch.float32, 0)
    assert ModelShape(2, 64, 4, 2, 160, 256).parameters == module.parameter_count()


@pytest.mark.parametrize("size", [1e6, 1e8, 7e9, 70e9, 400e9])
def test_typical_shapes_are_near_the_size_asked_for(size: float) -> None:
    assert typical_shape(size).parameters == pytest.approx(size, rel=0.3 if size < 1e7 else 0.02)


def test_hugging_face_configs(tmp_path: Path) -> None:
    llama = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "activation_function": "gelu_new"}
    mixtral = {**llama, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    shapes = []
    for values in (llama, gpt2, mixtral):
        (tmp_path / "config.json").write_text(json.dumps(values))
        shapes.append(read_config(tmp_path / "config.json"))
    assert shapes[0] == LLAMA_8B
    assert shapes[1].parameters == pytest.approx(124e6, rel=0.01) and shapes[1].tied and not shapes[1].gated
    assert shapes[2].parameters == pytest.approx(46.7e9, rel=0.01), "Mixtral 8x7B"
    assert shapes[2].multiplied_parameters == pytest.approx(12.8e9, rel=0.02), "of which a token uses two experts"


@pytest.mark.parametrize(
    "text, message",
    [("{", "not JSON"), ("[]", "JSON object"), ('{"hidden_size": 64}', "num_hidden_layers"), (None, "cannot be read")],
)
def test_unusable_configs_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_config(path)


@pytest.mark.parametrize("text, count", [("7B", 7e9), ("350m", 350e6), ("1.5T", 1.5e12), ("200000", 2e5)])
def test_parameter_counts(text: str, count: float) -> None:
    assert parse_parameter_count(text) == count


# ---- memory ----


def test_host_bytes_are_those_of_the_architecture() -> None:
    needs = estimate_memory(LLAMA_8B, Settings())
    assert needs.host_peak / LLAMA_8B.parameters == pytest.approx(12 + 2 + 2 + 2)
    small = estimate_memory(LLAMA_8B, Settings(state_dtype="bf16"))
    assert small.host_peak / LLAMA_8B.parameters == pytest.approx(8 + 2 + 2 + 2)
    split = estimate_memory(LLAMA_8B, Settings(master_dtype="split"))
    assert split.host_peak / LLAMA_8B.parameters == pytest.approx(2 + 8 + 2 + 2 + 2)
    least = estimate_memory(LLAMA_8B, Settings(master_dtype="split", state_dtype="bf16"))
    assert least.host_peak / LLAMA_8B.parameters == pytest.approx(12.0)
    codes = estimate_memory(LLAMA_8B, Settings(state_dtype="8bit"))
    assert codes.host_peak / LLAMA_8B.parameters == pytest.approx(4 + 2 + 2 / 256 + 2 + 2 + 2)
    wide = estimate_memory(LLAMA_8B, Settings(gradient_dtype="fp32"))
    assert wide.host_peak / LLAMA_8B.parameters == pytest.approx(12 + 4 + 2 + 2)
    assert wide.gpu_moments["end of backward"] == 2 * needs.gpu_moments["end of backward"]


def test_a_pass_moves_fewer_bytes_with_leaner_state() -> None:
    seconds = {
        (moments, master): plain_pass_seconds(1e9, 28e9, Settings(state_dtype=moments, master_dtype=master))
        for moments in ("fp32", "bf16", "8bit")
        for master in ("fp32", "split")
    }
    whole, split = {"fp32": 28, "bf16": 20, "8bit": 16}, {"fp32": 26, "bf16": 18, "8bit": 14}
    expected = {(moments, "fp32"): size for moments, size in whole.items()}
    expected |= {(moments, "split"): size for moments, size in split.items()}
    assert {setting: 28 * time for setting, time in seconds.items()} == pytest.approx(expected)


def test_what_engines_do_not_have_is_refused() -> None:
    for other in (Settings(engine="torch"), Settings("zero-offload", "zero3", ranks=2)):
        for moments, master in (("bf16", "fp32"), ("fp32", "split"), ("8bit", "split")):
            with pytest.raises(ArgumentError, match="bf16 and 8-bit moments and split masters are superoffload's"):
                replace(other, state_dtype=moments, master_dtype=master)
    with pytest.raises(ArgumentError, match="master_dtype=half: expected fp32 or split"):
        Settings(master_dtype="half")


def test_gradients_in_fp32_cost_bytes_where_they_can_be_had() -> None:
    """DistributedDataParallel refuses them, and DeepSpeed has a setting of its own."""
    for sharding, ranks, wider in (("none", 1, True), ("fsdp2", 2, True), ("none", 2, False), ("zero3", 2, False)):
        narrow = Settings(sharding=sharding, ranks=ranks, accumulation=4)
        wide = replace(narrow, gradient_dtype="fp32")
        assert wide.gradient_bytes - narrow.gradient_bytes == (2 if wider else 0)
        memory = [estimate_memory(LLAMA_8B, one) for one in (narrow, wide)]
        own = LLAMA_8B.parameters / ranks
        assert memory[1].host_peak - memory[0].host_peak == pytest.approx(2 * own if wider else 0)
        slots = 2 * 2 * BUCKET_ELEMENTS
        assert memory[0].gpu["staging"] == slots + 2 * BUCKET_ELEMENTS, "two slots down, one up"
        assert memory[1].gpu_peak - memory[0].gpu_peak == pytest.approx(2 * own + slots if wider else 0)
        times = [estimate_step(LLAMA_8B, GH200_96, one) for one in (narrow, wide)]
        assert (times[1].optimizer > times[0].optimizer) == wider
    with pytest.raises(ArgumentError, match="gradient_dtype=fp16: expected fp32 or bf16"):
        Settings(gradient_dtype="fp16")


def test_what_is_sharded_shrinks_with_the_ranks() -> None:
    one = estimate_memory(LLAMA_8B, Settings("torch", "fsdp2", 1))
    eight = estimate_memory(LLAMA_8B, Settings("torch", "fsdp2", 8))
    for name in ("parameters", "master", "moments", "gradients"):
        assert eight.gpu[name] == pytest.approx(one.gpu[name] / 8)
    zero1 = estimate_memory(LLAMA_8B, Settings("torch", "zero1", 8))
    assert zero1.gpu["parameters"] == 2 * LLAMA_8B.parameters and zero1.gpu["moments"] == LLAMA_8B.parameters


def test_checkpointing_and_batch_move_activations() -> None:
    base = Settings()
    plain, head = activation_bytes(LLAMA_8B, base)
    few, same_head = activation_bytes(LLAMA_8B, replace(base, checkpointing="full"))
    double, _ = activation_bytes(LLAMA_8B, replace(base, micro_batch=2))
    assert few < plain / 10 and same_head == head and double == 2 * plain


def test_what_binds_is_named() -> None:
    big = typical_shape(30e9)
    assert check_fit(big, GH200_96, Settings("torch")).binds == "GPU memory"
    starved = replace(GH200_96, host_memory=100 * GB)
    fit = check_fit(typical_shape(10e9), starved, Settings(checkpointing="full"))
    assert not fit.fits and fit.binds == "host memory"


def test_largest_model_is_the_edge() -> None:
    settings = Settings(checkpointing="full")
    largest = largest_model(GH200_96, settings)
    assert largest is not None and check_fit(largest, GH200_96, settings).fits
    assert not check_fit(typical_shape(1.1 * largest.parameters), GH200_96, settings).fits
    assert largest_model(replace(GH200_96, gpu_memory=2 * GB), settings) is None


# ---- time ----


def test_more_tokens_hide_more_of_the_optimizer() -> None:
    exposed = [
        estimate_step(LLAMA_8B, GH200_96, Settings(accumulation=1, micro_batch=batch)).optimizer_exposed
        for batch in (1, 2, 4, 16)
    ]
    assert exposed[0] > exposed[1] > exposed[2] and exposed[3] == pytest.approx(exposed[2])
    assert exposed[0] > 4 * exposed[3], "what stays is the last buckets, and a copy on the GPU"


@pytest.mark.parametrize("host_bandwidth", [420e9, 5e12])
def test_what_is_left_of_the_way_up_by_hand(host_bandwidth: float) -> None:
    """Backward hides all but what the last of 64 buckets takes, or the last two take on the way up, and the copy."""
    hardware = replace(GH200_96, gpu_memory=1e15, link_down=54e9, link_up=54e9, host_bandwidth=host_bandwidth)
    numel = LLAMA_8B.parameters
    down = up = 2 * numel / 54e9 / 64
    stepped = down + 29.2 * numel / host_bandwidth / 64
    exposed = max(stepped + up, down + 2 * up) + 4 * numel / hardware.gpu_bandwidth
    settings = Settings(micro_batch=64, checkpointing="full")
    assert estimate_step(LLAMA_8B, hardware, settings).optimizer_exposed == pytest.approx(exposed)


def test_new_parameters_travel_before_the_verdict_where_there_is_room() -> None:
    behind_pcie = replace(GH200_96, link_down=54e9, link_up=54e9)
    settings = Settings(micro_batch=16, checkpointing="full")
    up = 2 * LLAMA_8B.parameters / behind_pcie.link_up

    def exposed(gpu_memory: float) -> float:
        return estimate_step(LLAMA_8B, replace(behind_pcie, gpu_memory=gpu_memory), settings).optimizer_exposed

    needs = estimate_memory(LLAMA_8B, settings).gpu_peak
    least = (needs + CONTEXT_BYTES) / (1 - FRAGMENTATION)
    more = 2 * LLAMA_8B.parameters / (1 - FRAGMENTATION)
    assert exposed(least + 1.9 * more) > up > 5 * exposed(least + 2.1 * more)
    for engine in (Settings(ranks=2), Settings(ranks=2, sharding="zero3")):  # DDP and ZeRO-3 keep gradients
        kept = replace(engine, micro_batch=16, checkpointing="full")
        assert estimate_step(LLAMA_8B, replace(behind_pcie, gpu_memory=1e15), kept).optimizer_exposed > up / 2
    clips = replace(settings, clip_rate=1.0)
    assert estimate_step(LLAMA_8B, behind_pcie, clips).optimizer_exposed > up, "what was staged is discarded"


def test_step_is_never_faster_than_its_bounds() -> None:
    for engine in ENGINES:
        sharding = "none" if engine in ("torch", "superoffload") else "zero3"
        for batch in (1, 8):
            step = estimate_step(LLAMA_8B, GH200_96, Settings(engine, sharding, micro_batch=batch))
            assert step.total >= step.forward + step.backward
            assert step.optimizer == pytest.approx(step.optimizer_hidden + step.optimizer_exposed)
            if engine == "superoffload":
                assert step.total >= 28 * LLAMA_8B.parameters / GH200_96.host_bandwidth


def test_clipping_costs_and_deepspeed_loses_its_overlap_with_it() -> None:
    def exposed(engine: str, rate: float) -> float:
        settings = Settings(engine, "zero3", clip_rate=rate, micro_batch=8)
        return estimate_step(LLAMA_8B, GH200_96, settings).optimizer_exposed

    ours = [exposed("superoffload", rate) for rate in (0.0, 0.01, 0.5, 1.0)]
    assert ours == sorted(ours)
    assert exposed("deepspeed-superoffload", 0.01) > 3 * exposed("deepspeed-superoffload", 0.0)
    assert ours[1] < 1.15 * ours[0]


def test_slower_link_is_never_faster() -> None:
    slow = replace(GH200_96, link_down=20e9, link_up=20e9)
    for engine in ("zero-offload", "deepspeed-superoffload", "superoffload"):
        settings = Settings(engine, "zero3")
        assert estimate_step(LLAMA_8B, slow, settings).total > estimate_step(LLAMA_8B, GH200_96, settings).total


# ---- placement, command ----


def test_auto_placement_is_explained_with_the_numbers_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "--model", "7B", "--json", str(path)]) == 0
    shown, values = capsys.readouterr().out, json.loads(path.read_text())
    auto, step, count = values["placement_auto"], values["step"], values["model"]["parameters"]
    optimizer = 28 * count / GH200_96.host_bandwidth
    free = values["memory"]["gpu_room"] - values["memory"]["gpu_need"]
    assert auto["gpu_fraction"] == pytest.approx(min(1 - step["backward"] / optimizer, 0.5 * free / (14 * count)))
    assert auto["gpu_bytes"] == pytest.approx(14 * auto["gpu_fraction"] * count)
    assert f'placement="auto" would keep {auto["gpu_fraction"]:.1%} of the state on the GPU' in shown
    assert "after 4 steps, by what it measured" in shown and 'placement={"gpu_fraction": f} sets it' in shown


def test_auto_placement_keeps_a_bucket_where_backward_hides_the_rest_and_is_not_for_other_engines() -> None:
    def auto(**options: Any) -> AutoPlacement | None:
        settings = Settings(**options)
        choice = evaluate(LLAMA_8B, GH200_96, settings)
        return auto_placement(LLAMA_8B, settings, choice.fit, choice.step, GH200_96.host_bandwidth)

    long = auto(micro_batch=16, checkpointing="full")
    assert long is not None and long.fraction == pytest.approx((32 << 20) / LLAMA_8B.parameters, rel=0.01)
    bf16, fp32 = auto(micro_batch=4, state_dtype="bf16"), auto(micro_batch=4)
    assert bf16 is not None and fp32 is not None and bf16.why != fp32.why
    split = auto(micro_batch=2, accumulation=4)
    assert split is not None and split.why != auto(micro_batch=8).why  # type: ignore[union-attr]
    assert auto(engine="torch") is None and auto(ranks=2, sharding="zero3") is None
    assert placement_lines(None) == []
    full = replace(long, fraction=0.0)
    assert 'placement="auto" would keep no state on the GPU' in placement_lines(full)[0]


def test_a_time_is_shown_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "7B", "--hardware", "gh200-96"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^Step, predicted: [\d.]+ s, [\d,]+ tokens/s", shown)
    assert "On the one GPU that was measured" in shown


def test_the_journal_is_shown_as_a_reservation_with_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "7B"]) == 0
    shown = capsys.readouterr().out
    count = typical_shape(7e9).parameters
    assert f"journal, reserved {2.0 * count / GB:>23.1f} GB" in shown
    assert f"on average 1.1 to 1.25 are used ({1.1 * count / GB:.1f} to {1.25 * count / GB:.1f} GB)" in shown
    assert main(["plan", "--model", "1B", "--engine", "torch"]) == 0
    assert "journal" not in capsys.readouterr().out


def test_command_reports_and_fails_if_it_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "7B", "--all", "--json", str(tmp_path / "plan.json")]) == 0
    shown, values = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    assert "It fits" in shown and "Assumptions" in shown and "data sheet" in shown
    assert values["passed"] and values["memory"]["host"]["journal, reserved"] == 2.0 * values["model"]["parameters"]
    assert {"torch", "superoffload"} <= {choice["settings"]["engine"] for choice in values["choices"]}
    assert main(["plan", "--model", "70B"]) == 1
    assert "It does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "no model given"),
        (["--model", "7X"], "model=7X: expected a parameter count"),
        (["--model", "7B", "--layers", "3"], "together with layers"),
        (["--model", "7B", "--hardware", "abacus"], "hardware=abacus: expected one of gh200-96"),
        (["--model", "7B", "--clip-rate", "2"], "clip_rate=2.0"),
        (["--model", "7B", "--sharding", "zero1"], "superoffload does not serve ZeRO stages 1 and 2"),
        (["--model", "7B", "--engine", "zero-offload", "--sharding", "none"], "expected sharding zero3"),
        (["--model", "7B", "--ranks", "0"], "ranks=0"),
        (["--layers", "0", "--hidden", "64", "--heads", "2"], "no model given"),
        (["--layers", "-1", "--hidden", "64", "--heads", "2"], "layers=-1"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
    assert main(["plan", "--model", "7B", "--plots", str(tmp_path / "plots")]) == 0
    for name in ("throughput.png", "memory.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_choice_counts_the_tokens_of_all_ranks() -> None:
    one, two = (evaluate(LLAMA_8B, GH200_96, Settings("torch", "none", ranks)) for ranks in (1, 2))
    assert two.tokens_per_second * two.step.total == pytest.approx(2 * one.tokens_per_second * one.step.total)
