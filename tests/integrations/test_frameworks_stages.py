"""Pipeline stages: the state of torch.optim.AdamW, and frameworks that know ranks of one data-parallel model only."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.compatibility import Refusal, compat
from tests.support.optional_packages import needs
from tests.support.rank_processes import error_of, flat_mesh, net, on_ranks, on_stages, optimizer_of, shard, tokens_of

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


@compat("state of torch.optim.AdamW taken over, and given back", "stages")
def test_torchs_state_of_stages() -> None:
    assert on_stages(2, both_ways_in_a_stage) == [True, True]


def unequal_stages(by_trainer: bool, folder: str) -> str:
    """A stage of its own on each rank; these know ranks of one data-parallel model only."""
    import accelerate
    from accelerate.state import AcceleratorState

    from tests.support.hugging_face import model_of, trainer_of

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        if not by_trainer:
            stage = net(torch.float32, layers=1 + dist.get_rank())
            return error_of(lambda: accelerate.Accelerator(cpu=True).prepare(stage))
        trainer = trainer_of(Path(folder), model_of(layers=1 + dist.get_rank()), "always")
        return error_of(trainer.train)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@needs("transformers", "accelerate")
@pytest.mark.parametrize(
    "by_trainer",
    [
        pytest.param(
            False, marks=compat("Accelerate: prepare, accumulate, clip_grad_norm_", "stages", refused=NOT_DDP)
        ),
        pytest.param(
            True,
            marks=[
                compat("Hugging Face Trainer, and its resume", "stages", refused=NOT_NAMED),
                compat("TRL's SFTTrainer", "stages", refused=NOT_NAMED),
                compat("TRL's GRPOTrainer and RLOOTrainer", "stages", refused=NOT_NAMED),
            ],
        ),
    ],
)
def test_what_knows_no_stages_refuses_them(by_trainer: bool, refusal: Refusal, tmp_path: Path) -> None:
    """By torch's DistributedDataParallel, in which Accelerate wraps them; with Trainer by the rank checks."""
    for error in on_ranks(2, unequal_stages, by_trainer, str(tmp_path)):
        refusal.check(error)
