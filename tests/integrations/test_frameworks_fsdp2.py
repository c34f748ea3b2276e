"""Accelerate, Trainer, TRL, Lightning and PEFT with FSDP2, with and without tensor parallelism; some in stages."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from superoffload import AdamW, checkpoints
from tests.support.accelerate_on_cpu import on_the_cpu
from tests.support.layouts import layouts
from tests.support.optional_packages import needs
from tests.support.rank_processes import (
    Stage,
    cut,
    data_rank,
    error_of,
    flat_mesh,
    net,
    on_mesh,
    on_ranks,
    optimizer_of,
    shard,
    tokens_of,
    wholes_of,
)
from tests.support.refusal import Refusal

pytestmark = pytest.mark.in_turn("frameworks fsdp2")

SHARDED = ("fsdp2", "mesh")
OF_TRL = needs("transformers", "accelerate", "trl", "datasets")


def loss_of(model: Any, seed: int) -> Tensor:
    loss: Tensor = model.loss(tokens_of(seed, data_rank()))
    return loss


def params_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# ---- loops: what one finds with each optimizer is (weights, digests of our state) ------------------------------------


def plain_run() -> list[Tensor]:
    """Laid out by hand, with torch's optimizer and clipping."""
    model = shard(net(torch.float32), flat_mesh())
    optimizer = torch.optim.AdamW(params_of(model), lr=1e-3)
    for seed in range(5):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        clip(model)
        optimizer.step()
    return wholes_of(model)


def clip(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if isinstance(model, Stage):  # torch knows this stage only
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)


def accelerated(mode: str) -> Any:
    import accelerate

    with on_the_cpu():
        inner: Any = net(torch.float32)
        config = None
        if flat_mesh().ndim > 1:
            config = accelerate.ParallelismConfig(dp_shard_size=2, tp_size=2)
            inner = shard(inner, flat_mesh())
            inner.tp_size = 2  # says that it is cut already
        accelerator = accelerate.Accelerator(cpu=True, parallelism_config=config)
        made = AdamW(params_of(inner), speculation=mode, threads=1, bucket_numel=1024)
        model, optimizer = accelerator.prepare(inner, made)
        for seed in range(5):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, seed))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert (made.stats()["buckets_speculated"] > 0) == (mode == "always")
        found = wholes_of(model), made.state_digests()
        made.close()
        return found


def adapted(kind: str) -> Any:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["head"], lora_dropout=0.0)
    model: Any = peft.get_peft_model(net(torch.float32), config)
    inner = shard(model.base_model.model, flat_mesh())
    params = params_of(inner)
    assert len(params) == 2
    ours = AdamW(params, speculation=kind, threads=1, model=inner) if kind != "torch" else None
    optimizer: Any = ours or torch.optim.AdamW(params)
    for seed in range(5):
        optimizer.zero_grad()
        loss_of(inner, seed).backward()
        optimizer.step()
    found = wholes_of(inner), {} if ours is None else ours.state_digests()
    if ours is not None:
        ours.close()
    return found


def by_lightning(folder: str, mode: str) -> Any:
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(torch.float32)

        def configure_model(self) -> None:
            if any(isinstance(p, DTensor) for p in self.net.parameters()) or isinstance(self.net, Stage):
                return
            if flat_mesh().ndim > 1:
                cut(self.net, self.device_mesh["tensor_parallel"])
            self.net = shard(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return loss_of(self.net, index)

        def configure_optimizers(self) -> Any:
            self.made = AdamW(params_of(self.net), speculation=mode, max_grad_norm=0.5, threads=1, model=self.net)
            return self.made

    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    with mock.patch.dict(os.environ, more):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), max_steps=5, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            plugins=[TorchElasticEnvironment()], use_distributed_sampler=False,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=dist.get_world_size() // 2),
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(5)), batch_size=1))
    found = wholes_of(module.net), module.made.state_digests()
    module.made.close()
    return found


def compared(framework: str, folder: str) -> bool:
    """In a rank: whether the bits are those of our synchronous mode; the weights must be torch's."""
    run: Any = {"Accelerate": accelerated, "PEFT": adapted, "Lightning": partial(by_lightning, folder)}[framework]
    (ours, always), (_, never) = run("always"), run("never")
    theirs = run("torch")[0] if framework == "PEFT" else plain_run()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6)
    return bool(always == never)


@needs("accelerate")
@layouts(*SHARDED)
def test_accelerate(ranks: Any) -> None:
    assert all(ranks(2, compared, "Accelerate", ""))


@needs("peft")
@layouts()
def test_lora(ranks: Any) -> None:
    assert all(ranks(2, compared, "PEFT", ""))


@needs("lightning")
@layouts()
def test_lightning(ranks: Any, tmp_path: Path) -> None:
    assert all(ranks(2, compared, "Lightning", str(tmp_path)))


# ---- Trainer and trainers of TRL ------------------------------------------------------------------------


def llama(folder: str) -> Any:
    """On a mesh it is loaded as Transformers itself lays it out."""
    from tests.support.hugging_face import model_of, transformers

    model = model_of()
    if flat_mesh().ndim == 1:
        return model
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/llama")
    dist.barrier()
    layout = transformers.DistributedConfig(tp_size=2, fsdp_size=2)
    return transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/llama", distributed_config=layout)


def trained(kind: str, folder: str, mode: str | None, resume: str | None = None, **options: Any) -> Any:
    """In a rank: (loss, norm) of each step, and digests. Where it generates and speculates, it sleeps meanwhile."""
    from superoffload.integrations.transformers import offload
    from tests.support.hugging_face import end, logs_of, trainer_of
    from tests.support.trl_trainers import generating, sft

    with on_the_cpu():
        if kind == "Trainer":
            trainer = trainer_of(Path(folder), llama(folder), None, **{"max_steps": 5, **options})
        else:
            make = sft if kind == "SFT" else partial(generating, kind)
            trainer = make(folder, lambda: llama(folder))
        if mode is not None:
            offload(trainer, speculation=mode, threads=1, sleep=kind == "GRPO" and mode == "always")
        trainer.train(resume_from_checkpoint=resume)
        assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
        curve = [(entry["loss"], entry["grad_norm"]) for entry in logs_of(trainer)]
        return curve, None if mode is None else end(trainer)


def trained_in_modes(kind: str, folder: str) -> list[Any]:
    return [trained(kind, folder, mode) for mode in ("always", "never", None)]


def check_trained(kind: str, ranks: Any, folder: Path) -> None:
    for always, never, (theirs, _) in ranks(2, trained_in_modes, kind, str(folder)):
        assert always == never
        curve = always[0]
        for ours, stock in zip(curve, theirs, strict=True):
            assert ours == pytest.approx(stock, rel=2e-2)
        assert curve[-1][0] < curve[0][0]


def resumed(folder: str) -> Any:
    """In a rank: whether a resumed run ends as one that never stopped; on a mesh, what Transformers says of saving."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    if flat_mesh().ndim > 1:
        return error_of(lambda: trained("Trainer", folder, "always", **saving))
    curve, digests = trained("Trainer", folder, "always", **saving)
    again, same = trained("Trainer", folder, "always", f"{folder}/checkpoint-3")
    return curve[-2:] == again[-2:] and digests == same


@needs("transformers", "accelerate")
@layouts(*SHARDED)
def test_trainer(ranks: Any, tmp_path: Path) -> None:
    check_trained("Trainer", ranks, tmp_path)
    for found in ranks(2, resumed, str(tmp_path)):
        refused = "Resuming is not supported for models sharded at load time"
        assert refused in found if ranks is on_mesh else found is True


@OF_TRL
@layouts(*SHARDED)
def test_sft_trainer(ranks: Any, tmp_path: Path) -> None:
    check_trained("SFT", ranks, tmp_path)


@OF_TRL
def test_trainers_that_generate(tmp_path: Path) -> None:
    for always, never, (theirs, _) in on_ranks(2, trained_in_modes, "GRPO", str(tmp_path)):
        assert always == never
        assert always[0][0] == pytest.approx(theirs[0], rel=2e-2)  # later ones are of other samples
        assert len(set(always[0])) > 1


def refused_by_trl(folder: str) -> str:
    return error_of(lambda: trained("GRPO", folder, "always"))


@pytest.mark.refused("its gradient differs from that of rank 0")
@OF_TRL
def test_tokens_that_differ_where_matrices_are_shared(refusal: Refusal, tmp_path: Path) -> None:
    for error in on_mesh(2, refused_by_trl, str(tmp_path)):
        refusal.check(error)


# ---- torch's state and weights ------------------------------------------------------------------------


def both_ways(folder: str) -> list[bool]:
    """Full state of torch.optim.AdamW into ours and ours into it; the weights exported as one file."""
    from safetensors.torch import load_file

    whole = net(torch.float32)
    torchs = torch.optim.AdamW(params_of(whole), lr=3e-3)
    loss_of(whole, 0).backward()
    for param in params_of(whole):
        grad: Any = param.grad
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    torchs.step()
    model = shard(copy.deepcopy(whole), flat_mesh())
    with optimizer_of(model) as optimizer:
        optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
        same = []
        for mine, theirs in zip(params_of(model), params_of(whole), strict=True):
            moment: Any = optimizer.state[mine]["exp_avg"]
            same.append(torch.equal(moment.full_tensor(), torchs.state[theirs]["exp_avg"]))
        given = optimizer.state_dict()
        for values in given["state"].values():
            values.update({key: v.full_tensor() for key, v in values.items() if isinstance(v, DTensor)})
        torchs.load_state_dict(given)
        same.append(float(torchs.state[params_of(whole)[0]]["step"]) == 1.0)
        path = checkpoints.export_weights(folder, model, optimizer, masters=True)
        dist.barrier()
        exported = load_file(path)
        return [*same, all(torch.equal(exported[name], p) for name, p in whole.named_parameters())]


@layouts(*SHARDED)
def test_torchs_state_and_exported_weights(ranks: Any, tmp_path: Path) -> None:
    assert all(all(found) for found in ranks(2, both_ways, str(tmp_path)))
