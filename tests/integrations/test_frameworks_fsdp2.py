"""Accelerate, Trainer, TRL, Lightning and PEFT with FSDP2, with and without tensor parallelism; some in stages."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from superoffload import AdamW, checkpoints
from tests.support.accelerate_on_cpu import on_the_cpu
from tests.support.compatibility import Refusal, compat
from tests.support.layouts import RANKS, layouts
from tests.support.optional_packages import needs
from tests.support.rank_processes import (
    Net,
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

pytestmark = pytest.mark.in_turn("frameworks fsdp2")

SHARDED = ("fsdp2", "mesh")
GENERATING = "TRL's GRPOTrainer and RLOOTrainer"


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


def loss_of(model: Any, seed: int) -> Tensor:
    loss: Tensor = model.loss(tokens_of(seed, data_rank()))
    return loss


def plain_run() -> list[Tensor]:
    """Laid out by hand, with torch's optimizer and clipping."""
    model = shard(net(torch.float32), flat_mesh())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
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


def accelerated() -> list[Any]:
    import accelerate

    found: list[Any] = []
    for mode in ("always", "never"):
        with on_the_cpu():
            inner: Any = net(torch.float32)
            config = None
            if flat_mesh().ndim > 1:
                config = accelerate.ParallelismConfig(dp_shard_size=2, tp_size=2)
                inner = shard(inner, flat_mesh())
                inner.tp_size = 2  # says that it is cut already
            accelerator = accelerate.Accelerator(cpu=True, parallelism_config=config)
            params = [p for p in inner.parameters() if p.requires_grad]
            made = AdamW(params, speculation=mode, threads=1, bucket_numel=1024)
            model, optimizer = accelerator.prepare(inner, made)
            for seed in range(5):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, seed))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            found.append((made.state_digests(), wholes_of(model), made.stats()["buckets_speculated"]))
            sharded = all(isinstance(p, DTensor) for p in model.parameters())
            made.close()
    return [*found, sharded, plain_run()]


@needs("accelerate")
@layouts(
    "Accelerate: prepare, accumulate, clip_grad_norm_",
    columns=SHARDED,
    notes={"mesh": "if tensor parallelism is applied before `prepare()`"},
)
def test_accelerate(ranks: Any) -> None:
    for (always, ours, speculated), (never, *_), sharded, theirs in ranks(2, accelerated):
        assert always == never and speculated > 0 and sharded
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6)


def trained_by_trainer(folder: str) -> dict[str, Any]:
    from tests.support.hugging_face import logs_of, trainer_of

    found: dict[str, Any] = {}
    for mode in ("always", "never", None):
        with on_the_cpu():
            trainer = trainer_of(Path(folder), llama(folder), mode, max_steps=6)
            trainer.train()
            found[str(mode)] = [(entry["loss"], entry["grad_norm"]) for entry in logs_of(trainer)]
            sharded = [isinstance(p, DTensor) for p in trainer.model.parameters()]
            if mode is not None:
                made = trainer.optimizer.optimizer
                found[f"{mode} bits"] = made.state_digests()
                found["speculated"] = max(found.get("speculated", 0), made.stats()["buckets_speculated"])
                made.close()
    found["sharded"] = all(sharded)
    if flat_mesh().ndim > 1:  # Transformers itself cannot resume these
        found["not resumed"] = error_of(lambda: resumed_by_trainer(folder, resume=False))
    else:
        found["resumed"] = [resumed_by_trainer(folder, resume=resume) for resume in (False, True)]
    return found


def resumed_by_trainer(folder: str, *, resume: bool) -> Any:
    from tests.support.hugging_face import logs_of, trainer_of

    with on_the_cpu():
        trainer = trainer_of(Path(folder), llama(folder), "always", max_steps=5, save_strategy="steps", save_steps=3)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
        made = trainer.optimizer.optimizer
        found = (made.state_digests(), [entry["loss"] for entry in logs_of(trainer)][-2:])
        made.close()
        return found


@needs("transformers", "accelerate")
@layouts(
    "Hugging Face Trainer, and its resume",
    columns=SHARDED,
    notes={"mesh": "of a model with `distributed_config`; Transformers itself refuses to resume it"},
)
def test_trainer(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, trained_by_trainer, str(tmp_path)):
        assert found["sharded"] and found["speculated"] > 0
        assert found["always bits"] == found["never bits"] and found["always"] == found["never"]
        for ours, theirs in zip(found["always"], found["None"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-2)
        assert found["always"][-1][0] < found["always"][0][0]
        if ranks is on_mesh:
            assert "Resuming is not supported for models sharded at load time" in found["not resumed"]
        else:
            assert found["resumed"][0] == found["resumed"][1]


def trained_by_trl(kind: str, folder: str) -> dict[str, Any]:
    """``kind``: "SFT", or a trainer that generates. Where it speculates, the optimizer sleeps meanwhile."""
    from superoffload.integrations.transformers import offload
    from tests.support.hugging_face import logs_of
    from tests.support.trl_trainers import generating, sft

    found: dict[str, Any] = {}
    for mode in ("always", "never", None):
        with on_the_cpu():
            make = sft if kind == "SFT" else partial(generating, kind)
            trainer = make(folder, lambda: llama(folder))
            if mode is not None:
                offload(trainer, speculation=mode, threads=1, sleep=kind != "SFT" and mode == "always")
            trainer.train()
            found[str(mode)] = [(entry["loss"], entry["grad_norm"]) for entry in logs_of(trainer)]
            found["sharded"] = all(isinstance(p, DTensor) for p in trainer.model.parameters())
            if mode is not None:
                made = trainer.optimizer.optimizer
                found[f"{mode} bits"] = made.state_digests()
                made.close()
    return found


@needs("transformers", "accelerate", "trl", "datasets")
@layouts("TRL's SFTTrainer", columns=SHARDED, notes={"mesh": "of a model with `distributed_config`"})
def test_sft_trainer(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, trained_by_trl, "SFT", str(tmp_path)):
        assert found["sharded"] and found["always"] == found["never"] and found["always bits"] == found["never bits"]
        for ours, theirs in zip(found["always"], found["None"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-2)
        assert found["always"][-1][0] < found["always"][0][0]


def refused_by_trl(kind: str, folder: str) -> str:
    return error_of(lambda: trained_by_trl(kind, folder))


@compat(GENERATING, "fsdp2")
@needs("transformers", "accelerate", "trl", "datasets")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trainers_that_generate(kind: str, tmp_path: Path) -> None:
    for found in on_ranks(2, trained_by_trl, kind, str(tmp_path)):
        assert found["sharded"] and found["always"] == found["never"] and found["always bits"] == found["never bits"]
        assert found["always"][0] == pytest.approx(found["None"][0], rel=2e-2)  # later ones are of other samples
        assert len(set(found["always"])) > 1


@compat(
    GENERATING,
    "mesh",
    refused="its gradient differs from that of rank 0",
    note="as TRL draws other tokens on each of the ranks that share a matrix",
)
@needs("transformers", "accelerate", "trl", "datasets")
def test_tokens_that_differ_where_matrices_are_shared(refusal: Refusal, tmp_path: Path) -> None:
    for error in on_mesh(2, refused_by_trl, "GRPO", str(tmp_path)):
        refusal.check(error)


def adapted() -> list[Any]:
    import peft

    found: list[Any] = []
    for kind in ("always", "never", "torch"):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["head"], lora_dropout=0.0)
        model: Any = peft.get_peft_model(net(torch.float32), config)
        inner = shard(model.base_model.model, flat_mesh())
        params = [p for p in inner.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(params)
        if kind != "torch":
            optimizer = AdamW(params, speculation=kind, threads=1, model=inner)
        for seed in range(5):
            optimizer.zero_grad()
            loss_of(inner, seed).backward()
            optimizer.step()
        found.append((wholes_of(inner), optimizer.state_digests() if kind != "torch" else None, len(params)))
        if kind != "torch":
            optimizer.close()
    return found


@needs("peft")
@layouts("PEFT: LoRA adapters", notes={"mesh": "if added before tensor parallelism"})
def test_lora(ranks: Any) -> None:
    for (ours, always, count), (_, never, _), (theirs, *_) in ranks(2, adapted):
        assert always == never and count == 2
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6)


def by_lightning(folder: str) -> list[Any]:
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self, mode: str) -> None:
            super().__init__()
            self.mode = mode
            self.net = net(torch.float32)

        def configure_model(self) -> None:
            if any(isinstance(p, DTensor) for p in self.net.parameters()) or isinstance(self.net, Stage):
                return
            if flat_mesh().ndim > 1:
                cut(self.net, self.device_mesh["tensor_parallel"])
            self.net = shard(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, index)

        def configure_optimizers(self) -> Any:
            params = [p for p in self.net.parameters() if p.requires_grad]
            self.made = AdamW(params, speculation=self.mode, max_grad_norm=0.5, threads=1, model=self.net)
            return self.made

    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    found: list[Any] = []
    kept = dict(os.environ)
    os.environ.update(more)
    try:
        for mode in ("always", "never"):
            module = Module(mode)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=dist.get_world_size(), max_steps=5, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                plugins=[TorchElasticEnvironment()], use_distributed_sampler=False,
                strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=dist.get_world_size() // 2),
            )  # fmt: skip
            trainer.fit(module, torch.utils.data.DataLoader(torch.arange(5), batch_size=1))  # type: ignore[arg-type]
            found.append((module.made.state_digests(), wholes_of(module.net)))
            module.made.close()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return [*found, plain_run()]


@needs("lightning")
@layouts("Lightning: automatic and manual optimization", notes=dict.fromkeys(RANKS, "with ModelParallelStrategy"))
def test_lightning(ranks: Any, tmp_path: Path) -> None:
    for (always, ours), (never, _), theirs in ranks(2, by_lightning, str(tmp_path)):
        assert always == never
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6)


def both_ways(folder: str) -> list[bool]:
    """Full state of torch.optim.AdamW into ours and ours into it; the weights exported as one file."""
    from superoffload.checkpoints.safetensors import TensorReader

    whole = net(torch.float32)
    torchs = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=3e-3)
    loss_of(whole, 0).backward()
    for param in torchs.param_groups[0]["params"]:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    torchs.step()
    model = shard(copy.deepcopy(whole), flat_mesh())
    with optimizer_of(model) as optimizer:
        optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
        same = []
        params = [p for p in model.parameters() if p.requires_grad]
        for mine, theirs in zip(params, torchs.param_groups[0]["params"], strict=True):
            moment: Any = optimizer.state[mine]["exp_avg"]
            same.append(torch.equal(moment.full_tensor(), torchs.state[theirs]["exp_avg"]))
        given = optimizer.state_dict()
        for values in given["state"].values():
            values.update({key: v.full_tensor() for key, v in values.items() if isinstance(v, DTensor)})
        torchs.load_state_dict(given)
        path = checkpoints.export_weights(folder, model, optimizer, masters=True)
        dist.barrier()
        reader = TensorReader(path)
        exported = all(torch.equal(reader.tensor(name), p) for name, p in whole.named_parameters())
        same.append(float(torchs.state[torchs.param_groups[0]["params"][0]]["step"]) == 1.0)
        return [all(same), exported]


@layouts(
    "state of torch.optim.AdamW taken over, and given back",
    "the model exported as safetensors for from_pretrained",
    columns=SHARDED,
)
def test_torchs_state_and_exported_weights(ranks: Any, tmp_path: Path) -> None:
    assert all(found == [True, True] for found in ranks(2, both_ways, str(tmp_path)))


def replaced_too_late() -> list[str]:
    """Groups are given other parameters once there is state for those they had."""
    errors = []
    for first in ("step", "masters"):
        model = net(torch.float32)
        with optimizer_of(model, replicated="local") as optimizer:
            if first == "step":
                loss_of(model, 0).backward()
                optimizer.step()
            else:
                optimizer.load_masters({name: p.detach().clone() for name, p in model.named_parameters()})
            other: Net = net(torch.float32, seed=2)
            optimizer.param_groups[0]["params"] = [p for p in other.parameters() if p.requires_grad]
            loss_of(other, 0).backward()
            errors.append(error_of(optimizer.step))
    return errors


def test_replaced_parameters_whose_state_would_be_lost() -> None:
    for errors in on_ranks(2, replaced_too_late):
        for error in errors:
            assert "StateError" in error and "was taken out and others put in" in error
