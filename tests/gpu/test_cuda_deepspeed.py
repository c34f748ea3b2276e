"""DeepSpeed's stages on one GPU, through our adapter: as torch trains, with the same bits whatever is speculated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_suite.contestants import prepare_deepspeed
from benchmarks.gpu_suite.given_gradients import Model, gradients_of

STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2, "overlap_comm": True},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 10},
    "3, parameters offloaded": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
}
CLIPS = 0.65  # the norms of odd steps are a little larger, of even ones half of that
INFINITE, READ, STEPS = 3, 5, 8


class Found(NamedTuple):
    digests: dict[str, str]
    seen: list[float]  # norms, and what a program has read
    masters: list[Tensor]
    stats: Mapping[str, float]


def given(step: int, device: str) -> list[Tensor]:
    found = [gradient * (1.0 if step % 2 else 0.5) for gradient in gradients_of(step, torch.bfloat16, device)]
    if step == INFINITE:
        found[0][7] = math.inf  # the last that backward makes
    return found


def train(device: str, zero: dict[str, Any], options: dict[str, Any]) -> Found:
    """Trains with given gradients; one step is skipped, and before another a program reads all parameters."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    on_gpu = device == "cuda"
    offload = {"device": "superoffload", "pin_memory": on_gpu}
    parameters = {"offload_param": {**zero["offload_param"], "pin_memory": on_gpu}} if "offload_param" in zero else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIPS,
        "bf16": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 4000, **zero, "offload_optimizer": offload, **parameters},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "superoffload": {"bucket_numel": 2048, "threads": 2, **options},
        "steps_per_print": 10**9,
    }
    model = Model(torch.float32, "cpu")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    seen = []
    for step in range(STEPS):
        engine.backward(engine(given(step, device)))
        if step == READ and zero["stage"] == 3:
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                seen += [float(param.detach().cpu().double().sum()) for param in model.parameters()]
        engine.step()
        seen.append(float(engine.get_global_grad_norm()))
    masters = [safe_get_full_fp32_param(param).cpu() for param in model.parameters()]
    found = Found(engine.optimizer.state_digests(), seen, masters, engine.optimizer.stats())
    engine.destroy()
    return found


def train_every_stage(device: str) -> dict[str, list[Found]]:
    """Trains waiting, speculating, and speculating with delivery on demand."""
    prepare_deepspeed(device)
    import deepspeed

    from superoffload.integrations.deepspeed import enable

    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)
    enable()
    ways: list[dict[str, Any]] = [{"speculation": "never"}, {"speculation": "always"}]
    ways.append({**ways[1], "delivery": "on_demand"})
    return {name: [train(device, zero, way) for way in ways] for name, zero in STAGES.items()}


def expected() -> list[Tensor]:
    """Returns the masters that torch.optim.AdamW makes of the same gradients."""
    model = Model(torch.bfloat16, "cpu").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        for param, gradient in zip(model.parameters(), given(step, "cpu"), strict=True):
            param.grad = gradient.float()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPS)
        if torch.isfinite(norm):
            optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install 'superoffload[deepspeed]'")
@pytest.mark.in_turn("cuda deepspeed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_stage_trains_as_torch_and_speculation_changes_no_bit(device: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # DeepSpeed chooses its device only once
        found = pool.submit(train_every_stage, device).result(timeout=170)
    for name, ways in found.items():
        for one in ways:
            assert (one.digests, one.seen) == (found["1"][0].digests, ways[0].seen), name
        for master, truth in zip(ways[0].masters, expected(), strict=True):
            torch.testing.assert_close(master, truth, rtol=1e-5, atol=1e-7)
        waiting, *speculating = [way.stats for way in ways]
        assert waiting["buckets_speculated"] == 0 and {way.stats["skipped_steps"] for way in ways} == {1}, name
        for stats in speculating:
            assert stats["buckets_committed"] > 0 < stats["buckets_replayed"], name
            assert stats["buckets_skipped"] > 0 or name == "1", name
            if device == "cuda" and "offloaded" in name:
                assert stats["buckets_undone"] > 0, "what the program has read was not speculated in place"
