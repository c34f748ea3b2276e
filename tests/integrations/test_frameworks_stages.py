"""Pipeline stages: the state of torch.optim.AdamW, and frameworks that know ranks of one data-parallel model only."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.optional_packages import needs
from tests.support.rank_processes import error_of, flat_mesh, net, on_ranks, on_stages, optimizer_of, shard, tokens_of
from tests.support.refusal import Refusal

NOT_DDP = "DDP expects same model across all ranks"
NOT_NAMED = "Different parameters of one model need different names"


def both_ways_in_a_stage() -> bool:
    """State of torch.optim.AdamW into ours and back, of this stage's parameters."""
    stage = shard(net(torch.float32), flat_mesh())
    params = [p for p in stage.parameters() if p.requires_grad]
    torchs = torch.optim.AdamW(params, lr=3e-3)
    stage.loss(tokens_of(0, 0)).backward()
    torchs.step()
    expected = copy.deepcopy(torchs.state_dict()["state"])
    with optimizer_of(stage) as optimizer:
        optimizer.load_state_dict(torchs.state_dict())
        torchs.load_state_dict(optimizer.state_dict())
    given = torchs.state_dict()["state"]
    kinds = ("step", "exp_avg", "exp_avg_sq")
    return bool(given) and all(torch.equal(given[i][key], expected[i][key]) for i in expected for key in kinds)


def test_torchs_state_of_stages() -> None:
    assert on_stages(2, both_ways_in_a_stage) == [True, True]


def unequal_stages(framework: str, folder: str) -> str:
    """A stage of its own on each rank; these know ranks of one data-parallel model only."""
    import accelerate
    from accelerate.state import AcceleratorState

    from superoffload.integrations.transformers import offload
    from tests.support.hugging_face import model_of, trainer_of
    from tests.support.trl_trainers import generating, sft

    stage = partial(model_of, layers=1 + dist.get_rank())
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        if framework == "Accelerate":
            plain = net(torch.float32, layers=1 + dist.get_rank())
            return error_of(lambda: accelerate.Accelerator(cpu=True).prepare(plain))
        if framework == "Trainer":
            trainer = trainer_of(Path(folder), stage(), None)
        else:
            trainer = sft(folder, stage) if framework == "SFT" else generating(framework, folder, stage)
        offload(trainer, threads=1)
        return error_of(trainer.train)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def refused_row(framework: str, error: str, *packages: str) -> Any:
    marks = [pytest.mark.refused(error), needs("transformers", "accelerate", *packages)]
    return pytest.param(framework, marks=marks, id=framework)


@pytest.mark.parametrize(
    "framework",
    [
        refused_row("Accelerate", NOT_DDP),
        refused_row("Trainer", NOT_NAMED),
        refused_row("SFT", NOT_NAMED, "trl", "datasets"),
        refused_row("GRPO", NOT_NAMED, "trl", "datasets"),
    ],
)
def test_what_knows_no_stages_refuses_them(framework: str, refusal: Refusal, tmp_path: Path) -> None:
    """By torch's DistributedDataParallel, in which Accelerate wraps them; with Trainer by the rank checks."""
    for error in on_ranks(2, unequal_stages, framework, str(tmp_path)):
        refusal.check(error)
