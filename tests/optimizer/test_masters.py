"""Masters follow writes to parameters: by bits, where a parameter is not the rounding of its master any more."""

from __future__ import annotations

import torch
from torch import Tensor

from superoffload import CPUAdamW
from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.engine_options import EngineOptions
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver

FINE = 1.0 + 2**-20  # rounds to 1 in bf16
MASTERS = [FINE, FINE, 0.0, -0.0]
WRITTEN = [1.0, 3.0, -0.0, -0.0]
FOLLOWED = [FINE, 3.0, -0.0, -0.0]


def assert_followed(master: Tensor) -> None:
    assert torch.equal(master.view(torch.int32), torch.tensor(FOLLOWED).view(torch.int32)), master


def test_partitions_of_zero_3() -> None:
    published = torch.tensor(MASTERS).bfloat16()
    shard = Shard(
        index=0,
        name="partition",
        group=0,
        numel=4,
        gradient_dtype=torch.float32,
        published_dtype=torch.bfloat16,
        master=torch.tensor(MASTERS),
        exp_avg=torch.zeros(4),
        exp_avg_sq=torch.zeros(4),
        target=lambda: published,
    )
    gradient = torch.zeros(4)
    hyper = GroupHyper(1e-3, 0.9, 0.999, 1e-8, 0.0)
    options = EngineOptions("always", None, [-1])
    driver = PartitionDriver([Partition(7, 0, shard, gradient, gradient)], 1, options, lambda group: hyper, pin=False)
    try:
        published.copy_(torch.tensor(WRITTEN))
        driver.take_over(7)
        assert_followed(shard.master)
    finally:
        driver.close()


def test_masters_of_a_checkpoint() -> None:
    param = torch.nn.Parameter(torch.tensor(WRITTEN).bfloat16())
    optimizer = CPUAdamW([param], threads=1)
    state = optimizer.state_dict()
    zeros = torch.zeros(4)
    state["state"] = {
        0: {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros, "master": torch.tensor(MASTERS)}
    }
    optimizer.load_state_dict(state)
    assert_followed(optimizer.state[param]["master"])
    optimizer.close()
