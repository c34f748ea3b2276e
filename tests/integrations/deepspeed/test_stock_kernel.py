"""Bit-equality with stock ZeRO-Offload when DeepSpeed's own Adam kernel is plugged into our schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed import stock_kernel
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, WAYS, Scenario
from tests.support.deepspeed.training import Small, config, end, make_engine, masters, run_steps

pytestmark = pytest.mark.in_turn("stock kernel")


def train(way: str, model: str, more: dict[str, Any], micros: int) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    offload, options = WAYS[way]
    options = None if options is None else {**options, "bucket_numel": 1 << 24}
    configuration = config(offload, options=options, **more)
    del configuration["optimizer"]["params"]["torch_adam"]
    torch.manual_seed(1)
    scenario = Scenario()
    with stock_kernel.plugged_in():
        engine = make_engine(configuration, Small() if model == "small" else scenario.model())
        if way != "stock":
            stock_kernel.use(engine.optimizer)
        if model == "small":
            record = run_steps(engine, range(6), micros=micros)
        else:
            record = run_steps(engine, range(6), micros=micros, loss_of=scenario.loss_of)
    stats = None if way == "stock" else engine.optimizer.stats()
    found = {name: value.clone() for name, value in masters(engine).items()}
    end(engine)
    return found, record, stats


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "clip sometimes": ("recorded", {"clip": CLIP_SOME}, 1),
    "accumulation": ("recorded", {"clip": CLIP_SOME, "accumulation": 2}, 2),
    "a model that learns, fp16": ("small", {"clip": 1.9, "precision": "fp16 64"}, 1),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", CASES)
def test_bits_of_stock(case: str, two_ranks: Ranks) -> None:
    model, more, micros = CASES[case]
    stock = two_ranks.run(train, "stock", model, more, micros)
    for way in ("match", "match, waiting"):
        ours = two_ranks.run(train, way, model, more, micros)
        for (expected, record, _), (found, again, stats) in zip(stock, ours, strict=True):
            assert again == record  # losses, norms, skips: to the bit
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            if way == "match":
                assert stats["buckets_committed"] or stats["buckets_replayed"]
    if case == "clip sometimes":
        assert stats["buckets_stepped"] == 6
