"""Accelerate, Trainer, TRL, Lightning and PEFT with FSDP2, with and without tensor parallelism, and in stages."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
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
from tests.support.optional_packages import needs
from tests.support.rank_processes import (
    RANKS,
    Stage,
    cut,
    error_of,
    flat_mesh,
    layouts,
    loss_of,
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
OF_TRL = needs("transformers", "accelerate", "trl", "datasets")


def params_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Accelerate offers FSDP and ParallelismConfig for ranks with GPUs only; takes the same path on a CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    make = AcceleratorState.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.distributed_type = DistributedType.FSDP
        if getattr(self, "fsdp_plugin", None) is None:
            self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)

    more = {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    patches: Any = mock.patch.object(Accelerator, "multi_device", property(lambda _: True))
    if flat_mesh().ndim == 1:
        more.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
        patches = mock.patch.object(AcceleratorState, "__init__", made)
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, more), patches:
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


# ---- loops: what one finds with each optimizer is (weights, digests of our state) ------------------------------------


def plain(make: Callable[..., Any], model: Any, clip: float | None = None) -> Any:
    """Laid out by hand."""
    model = shard(model, flat_mesh())
    optimizer = make(params_of(model), model=model)
    for seed in range(5):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        if clip is not None:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if isinstance(model, Stage):  # torch knows this stage only
                square = norm.square()
                dist.all_reduce(square)
                norm = square.sqrt()
            nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
        optimizer.step()
    return model, optimizer


def accelerated(make: Callable[..., Any]) -> Any:
    import accelerate

    with on_the_cpu():
        inner: Any = net(torch.float32)
        config = None
        if flat_mesh().ndim > 1:
            config = accelerate.ParallelismConfig(dp_shard_size=2, tp_size=2)
            inner = shard(inner, flat_mesh())
            inner.tp_size = 2  # says that it is cut already
        accelerator = accelerate.Accelerator(cpu=True, parallelism_config=config)
        made = make(params_of(inner), bucket_numel=1024)
        model, optimizer = accelerator.prepare(inner, made)
        for seed in range(5):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, seed))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return model, made


def adapted(make: Callable[..., Any]) -> Any:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["head"], lora_dropout=0.0)
    model: Any = peft.get_peft_model(net(torch.float32), config)
    assert len(params_of(model)) == 2
    return plain(make, model.base_model.model)


def by_lightning(folder: str, make: Callable[..., Any]) -> Any:
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
            loss: Tensor = loss_of(self.net, index)
            return loss

        def configure_optimizers(self) -> Any:
            self.made = make(params_of(self.net), max_grad_norm=0.5, model=self.net)
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
    return module.net, module.made


COMPARED: dict[str, Any] = {"Accelerate": accelerated, "PEFT": adapted, "Lightning": by_lightning}


def compared(framework: str, folder: str) -> None:
    """In a rank: the bits are those of our synchronous mode, the weights torch's."""
    run: Any = partial(by_lightning, folder) if framework == "Lightning" else COMPARED[framework]
    digests = []
    for mode in ("always", "never"):
        model, optimizer = run(partial(AdamW, lr=1e-3, speculation=mode, threads=1))
        ours = wholes_of(model)
        digests.append(optimizer.state_digests())
        if framework != "Lightning":  # there the first buckets prove the clip
            assert (optimizer.stats()["buckets_speculated"] > 0) == (mode == "always")
        optimizer.close()
    assert digests[0] == digests[1]

    def torchs(params: Any, model: Any) -> Any:
        return torch.optim.AdamW(params, lr=1e-3)

    theirs, _ = adapted(torchs) if framework == "PEFT" else plain(torchs, net(torch.float32), clip=0.5)
    for a, b in zip(ours, wholes_of(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6)


LAID_OUT = [(name, layout) for name in COMPARED for layout in (SHARDED if name == "Accelerate" else RANKS)]


@pytest.mark.parametrize(
    ("framework", "layout"), [pytest.param(name, layout, marks=needs(name.lower())) for name, layout in LAID_OUT]
)
def test_frameworks(framework: str, layout: str, tmp_path: Path) -> None:
    RANKS[layout](2, compared, framework, str(tmp_path))


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
    from tests.support.hugging_face import end, generating, logs_of, sft, trainer_of

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


def trained_in_modes(kind: str, folder: str) -> None:
    always, never, (theirs, _) = (trained(kind, folder, mode) for mode in ("always", "never", None))
    assert always == never
    curve = always[0]
    for ours, stock in zip(curve, theirs[:1] if kind == "GRPO" else theirs, strict=kind != "GRPO"):
        assert ours == pytest.approx(stock, rel=2e-2)  # later ones of GRPO are of other samples
    assert len(set(curve)) > 1 if kind == "GRPO" else curve[-1][0] < curve[0][0]


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
    ranks(2, trained_in_modes, "Trainer", str(tmp_path))
    for found in ranks(2, resumed, str(tmp_path)):
        refused = "Resuming is not supported for models sharded at load time"
        assert refused in found if ranks is on_mesh else found is True


def refused_by_trl(folder: str) -> str:
    return error_of(lambda: trained("GRPO", folder, "always"))


@OF_TRL
def test_trainers_of_trl(tmp_path: Path) -> None:
    """Where matrices are shared, it draws tokens that differ on the ranks that share one."""
    for ranks, kind in ((on_ranks, "SFT"), (on_mesh, "SFT"), (on_ranks, "GRPO")):
        ranks(2, trained_in_modes, kind, str(tmp_path))
    for error in on_mesh(2, refused_by_trl, str(tmp_path)):
        assert "its gradient differs from that of rank 0" in error


def unequal_stages(framework: str, folder: str) -> str:
    """A stage of its own on each rank; these know ranks of one data-parallel model only."""
    import accelerate
    from accelerate.state import AcceleratorState

    from superoffload.integrations.transformers import offload
    from tests.support.hugging_face import generating, model_of, sft, trainer_of

    layers = 1 + dist.get_rank()
    stage = partial(model_of, layers=layers)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        if framework == "Accelerate":
            return error_of(lambda: accelerate.Accelerator(cpu=True).prepare(net(torch.float32, layers=layers)))
        if framework == "Trainer":
            trainer = trainer_of(Path(folder), stage(), None)
        else:
            trainer = sft(folder, stage) if framework == "SFT" else generating(framework, folder, stage)
        offload(trainer, threads=1)
        return error_of(trainer.train)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@OF_TRL
@pytest.mark.parametrize("framework", ["Accelerate", "Trainer", "SFT", "GRPO"])
def test_what_knows_no_stages_refuses_them(framework: str, tmp_path: Path) -> None:
    """By torch's DistributedDataParallel, in which Accelerate wraps them; with Trainer by the rank checks."""
    refused = "Different parameters of one model need different names"
    if framework == "Accelerate":
        refused = "DDP expects same model across all ranks"
    for error in on_ranks(2, unequal_stages, framework, str(tmp_path)):
        assert refused in error


# ---- torch's state and weights ------------------------------------------------------------------------


def both_ways(folder: str) -> None:
    """Full state of torch.optim.AdamW into ours and ours into it; the weights exported as one file."""
    from safetensors.torch import load_file

    whole = net(torch.float32)
    torchs = torch.optim.AdamW(params_of(whole), lr=3e-3)
    whole.loss(tokens_of(0, 0)).backward()
    torchs.step()
    model = shard(copy.deepcopy(whole), flat_mesh())
    with optimizer_of(model) as optimizer:
        optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
        for mine, theirs in zip(params_of(model), params_of(whole), strict=True):
            moment: Any = optimizer.state[mine]["exp_avg"]
            assert torch.equal(moment.full_tensor(), torchs.state[theirs]["exp_avg"])
        given = optimizer.state_dict()
        for values in given["state"].values():
            values.update({key: v.full_tensor() for key, v in values.items() if isinstance(v, DTensor)})
        torchs.load_state_dict(given)
        assert float(torchs.state[params_of(whole)[0]]["step"]) == 1.0
        path = checkpoints.export_weights(folder, model, optimizer, masters=True)
        dist.barrier()
        exported = load_file(path)
        assert all(torch.equal(exported[name], p) for name, p in whole.named_parameters())


@layouts(*SHARDED)
def test_torchs_state_and_exported_weights(ranks: Any, tmp_path: Path) -> None:
    ranks(2, both_ways, str(tmp_path))
