"""What a plan recommends: the fastest that fits, what a larger batch gains, what would fit where nothing does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from superoffload.engine.placement_choice import Measured, choose_fraction
from superoffload.errors import ArgumentError
from superoffload.tools.cli import main
from superoffload.tools.plan.configuration import configuration
from superoffload.tools.plan.machines import GB
from superoffload.tools.plan.memory_estimate import ENGINES, SHARDINGS, Settings, check_fit
from superoffload.tools.plan.models import ModelShape, typical_shape
from superoffload.tools.plan.profiles import GH200_96, PROFILES
from superoffload.tools.plan.recommendations import Advice, advice_lines
from superoffload.tools.plan.settings import SIMPLER, WORTH_DOUBLING, all_choices, evaluate, recommend, what_would_fit
from superoffload.tools.plan.step_time import estimate_step

LLAMA_8B = ModelShape(32, 4096, 32, 8, 14336, 128256)
H100, RTX_4090 = PROFILES["h100-pcie5"], PROFILES["rtx-4090"]


def test_what_is_recommended_fits_and_is_the_fastest() -> None:
    model, base = typical_shape(7e9), Settings(ranks=4, sharding="zero3")
    best = recommend(model, GH200_96, base)
    assert best is not None and best.fit.fits
    for other in all_choices(model, GH200_96, base):
        if other.fit.fits and other.settings.engine in ("torch", "superoffload"):
            assert SIMPLER * other.tokens_per_second <= best.tokens_per_second
    assert recommend(typical_shape(1e12), GH200_96, Settings()) is None


def test_of_the_settings_that_fit_the_one_that_changes_least_is_named() -> None:
    """Split masters lose nothing, so they come first; 8-bit moments lose most, so they come last."""
    base, model = Settings(sequence=512, checkpointing="full"), typical_shape(20e9)
    need = check_fit(model, GH200_96, base).gpu_need
    full = replace(GH200_96, gpu_memory=(need * 1.01 + 1.5 * GB) / 0.85)  # no room for state
    kept_free = full.host_memory - check_fit(model, full, base).host_room
    sizes = {16.0: ("fp32", "split"), 14.0: ("bf16", "fp32"), 12.0: ("bf16", "split"), 10.0: ("8bit", "split")}
    for size, expected in sizes.items():
        tight = replace(full, host_memory=model.parameters * size * 1.01 + kept_free)
        found = [choice.settings for choice in what_would_fit(model, tight, base)]
        assert (found[0].state_dtype, found[0].master_dtype) == expected
        assert (found[0].ranks, found[0].sequence) == (base.ranks, base.sequence)


def test_configurations_of_every_engine_have_its_form() -> None:
    for engine in ENGINES:
        for sharding in SHARDINGS:
            try:
                settings = Settings(engine, sharding, ranks=2, micro_batch=3)
            except ArgumentError:
                continue
            text = configuration(settings)
            if sharding.startswith("zero"):
                values = json.loads(text)
                assert values["train_micro_batch_size_per_gpu"] == 3
                assert values["zero_optimization"]["stage"] == int(sharding[-1])
                assert ("offload_optimizer" in values["zero_optimization"]) == (engine != "torch")
            else:
                compile(text, "configuration", "exec")


def test_the_batch_is_kept_and_a_larger_one_is_shown_with_its_gain() -> None:
    asked = Settings()
    advice = Advice.of(LLAMA_8B, H100, asked)
    same, larger = advice.same_batch, advice.larger_batch
    assert same is not None and larger is not None and advice.batches is not None
    assert same.settings.tokens_per_step == asked.tokens_per_step
    before = evaluate(LLAMA_8B, H100, asked).tokens_per_second
    assert advice.gain(same) == pytest.approx(same.tokens_per_second / before)
    gain = advice.gain(larger)
    assert gain is not None and gain > 5.5, "8 accumulation steps alone give that"
    rates = [choice.tokens_per_second for choice in advice.batches.sizes]
    assert rates[advice.batches.chosen + 1] < WORTH_DOUBLING * larger.tokens_per_second, "and the next is shown too"
    text = "\n".join(advice_lines(advice))
    assert "Recommended with the tokens per step as asked" in text and "that is for you to decide" in text
    split = f"--accumulation {larger.settings.accumulation} --micro-batch {larger.settings.micro_batch}"
    assert f"Recommended with a larger batch, if your training allows it: {split}" in text and f"{gain:.2f} x" in text


def test_accumulation_is_recommended_where_memory_allows_no_larger_micro_batch() -> None:
    """Of a machine whose GPU holds the model and one sequence."""
    need = evaluate(LLAMA_8B, H100, Settings(checkpointing="full", accumulation=2)).fit.gpu_need
    small = replace(H100, gpu_memory=(need + 1.6 * GB) / 0.85)
    advice = Advice.of(LLAMA_8B, small, Settings(checkpointing="full"))
    assert advice.larger_batch is not None and advice.larger_batch.settings.accumulation >= 8


def test_a_larger_batch_that_gains_nothing_is_not_recommended() -> None:
    advice = Advice.of(typical_shape(1e9), GH200_96, Settings("torch", micro_batch=8))
    assert advice.larger_batch is None and advice.same_batch is not None
    assert any("A larger batch is not worth it" in line for line in advice_lines(advice))
    assert advice.same_batch.settings.engine == "torch", "it fits on the GPU: nothing beats not offloading"


def test_placement_is_among_what_is_recommended() -> None:
    best = recommend(LLAMA_8B, H100, Settings())
    assert best is not None and 0 < best.settings.gpu_fraction <= 1 and best.fit.fits
    without = evaluate(LLAMA_8B, H100, replace(best.settings, gpu_fraction=0.0))
    assert best.tokens_per_second > without.tokens_per_second
    assert best.fit.host_need < without.fit.host_need and best.fit.gpu_need > without.fit.gpu_need


def test_state_on_the_gpu_moves_memory_and_shortens_the_end_of_the_step() -> None:
    exposed = [estimate_step(LLAMA_8B, H100, Settings(gpu_fraction=part)).optimizer_exposed for part in (0, 0.2, 0.9)]
    assert exposed[0] > exposed[1] > exposed[2] > 28 * 0.9 * LLAMA_8B.parameters / H100.gpu_bandwidth
    none, half = (check_fit(LLAMA_8B, H100, Settings(gpu_fraction=part)) for part in (0.0, 0.5))
    assert half.host_need == pytest.approx(none.host_need / 2)
    assert half.gpu_need - none.gpu_need == pytest.approx(14 * LLAMA_8B.parameters / 2)
    for wrong in ({"gpu_fraction": 1.5}, {"gpu_fraction": 0.5, "engine": "torch"}):
        with pytest.raises(ArgumentError, match=r"gpu_fraction="):
            Settings(**wrong)


def test_fsdp2_comes_before_zero3(capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/engines.md says: FSDP2 for new code."""
    main(["plan", "--model", "8B", "--ranks", "4"])
    shown = capsys.readouterr().out
    assert "superoffload with fsdp2, 2,048 tokens" in shown
    best = recommend(typical_shape(20e9), GH200_96, Settings("superoffload", "zero3", ranks=4))
    assert best is not None and best.settings.sharding == "fsdp2"


def test_what_does_not_fit_says_how_much_is_missing_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "30B", "--hardware", "rtx-4090"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"(?m)^It does not fit: [\d.]+ GB of GPU memory and [\d.]+ GB of host memory are missing", shown)
    assert "nothing that is planned here fits" in shown and "--ranks " in shown and "the network between nodes" in shown
    assert "unused memory" not in shown, "there is none"


def test_placement_by_measurement_never_speaks_of_negative_memory() -> None:
    fraction, why = choose_fraction(Measured(0.1, 1.0, -8 << 30, 10**9, 14, 32))
    assert fraction == 0.0 and "half of its 0.00 GiB of unused memory" in why


@pytest.mark.parametrize("size", ["1B", "8B", "70B"])
@pytest.mark.parametrize("name", ["rtx-4080", "h100-pcie5", "gh200-96"])
def test_nothing_that_is_shown_is_negative(size: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    main(["plan", "--model", size, "--hardware", name, "--json", str(path)])
    text = path.read_text()
    assert json.loads(text)["memory"]["gpu_room"] >= 0
    assert not [word for word in text.replace('"', " ").split() if word[:1] == "-" and word[1:2].isdigit()]


def test_a_small_host_keeps_most_of_its_memory_for_training() -> None:
    """16 GB are reserved of a large one; of 16 GB that would leave nothing."""
    laptop = replace(RTX_4090, host_memory=16 * GB)
    assert check_fit(typical_shape(3e8), laptop, Settings()).host_room == 12 * GB
    tiny = replace(laptop, gpu_memory=1 * GB)
    assert check_fit(typical_shape(3e8), tiny, Settings()).gpu_room == 0.0
