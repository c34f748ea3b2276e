"""Trains with verl's TrainingWorker on processors, one run after another in the same ranks; writes what each rank saw.

    torchrun --nproc-per-node 2 -m tests.integrations.verl_program FOLDER CASES

CASES: a JSON file with a list of runs. "optim", "engine" and "model" go into verl's configurations; "engines" says
whose engine trains; "actions" are methods of ``Run``, such as ["train 3", "save a-3"], and with "away" verl offloads to
the CPU as from a GPU. FOLDER is for a JSON file per rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

SEQUENCES = 4  # of each rank in a step
VENDORS = {"ours": "generic", "verl": "no vendor's"}
ASK_FOR_THE_DEVICE = (
    "verl.workers.engine.base.get_device_name",
    "verl.workers.engine.fsdp.transformer_impl.get_device_name",
    "superoffload.integrations.verl.get_device_name",
)


def main(folder: Path, cases: Path) -> None:
    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "tests.integrations.verl_on_cpu,superoffload.integrations.verl"
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_model(folder / "model")
    dist.barrier()
    seen = {case["name"]: run(folder, case) for case in json.loads(cases.read_text())}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def save_model(folder: Path) -> None:
    """Saves a small model with random weights and a tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.hugging_face import model_of

    model_of("llama").save_pretrained(folder)
    letters = ["<pad>", "<eos>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ' ' }}{% endfor %}"
    fast.save_pretrained(folder)


def run(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    os.environ["VERL_ENGINE_VENDOR"] = VENDORS[case.get("engines", "ours")]
    with contextlib.ExitStack() as stack:
        try:
            run = Run(folder, case)
            stack.callback(getattr(run.engine.optimizer, "close", lambda: None))
            if case.get("away"):
                stack.enter_context(_as_if_away())
            for action in case["actions"]:
                name, *arguments = action.split()
                getattr(run, name)(*arguments)
            return run.seen()
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)}


class Run:
    """Trains one model; its methods are what a case can do."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        torch.manual_seed(0)  # for adapters
        self._folder = folder
        self._numbers = 0
        self._recorded: dict[str, list[Any]] = {name: [] for name in ("losses", "norms", "lrs", "host bytes")}
        self._printed = io.StringIO()
        fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = {"strategy": "fsdp2", "use_torch_compile": False, "mixed_precision": fp32, **case.get("engine", {})}
        model = {"enable_gradient_checkpointing": False, **case.get("model", {})}
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type=case.get("type", "language_model"),
                model_config=HFModelConfig(
                    path=str(folder / "model"),
                    use_remove_padding=False,
                    override_config={"attn_implementation": "eager"},
                    **model,
                ),
                engine_config=FSDPEngineConfig(
                    use_dynamic_bsz=False, micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2, **engine
                ),
                optimizer_config=FSDPOptimizerConfig(
                    **{"lr": 1e-2, "total_training_steps": 8, "lr_warmup_steps": 2, **case.get("optim", {})}
                ),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.engine = self._worker.engine
        with _on_this_machine():
            self._worker.reset()

    # ---- actions --------------------------------------------------------------------------------------------------

    def train(self, count: str) -> None:
        for _ in range(int(count)):
            self._step(lambda loss: loss)

    def poison(self, value: str) -> None:
        """Trains once with gradients that are not finite."""
        self._step(lambda loss: loss * float(value))

    def fail(self) -> None:
        """Trains once; an error comes when all gradients are there."""
        with mock.patch.object(self.engine, "optimizer_step", side_effect=RuntimeError("no room for the step")):
            self.train("1")

    def save(self, name: str) -> None:
        self._worker.save_checkpoint(str(self._folder / name))

    def load(self, name: str) -> None:
        self._worker.load_checkpoint(str(self._folder / name))
        self._numbers = int(name.rpartition("-")[2])

    def infer(self) -> None:
        self._worker.set_loss_fn(_loss(lambda loss: loss))
        output = self._worker.infer_batch(_batch(self._numbers))
        self._recorded["losses"].append(output["metrics"]["loss"])

    def move(self, device: str, part: str) -> None:
        """Has verl move one part, as a caller of its engines may."""
        self.engine.to(device, **{"model": False, "optimizer": False, "grad": False, part: True})
        self.weigh()

    def weigh(self) -> None:
        self._recorded["host bytes"].append(self.engine.optimizer.stats()["host_bytes"])

    def scale(self) -> None:
        """Gives the engine the scaler that verl makes for fp16, here one for the CPU."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        self.engine.scaler = ShardedGradScaler(device="cpu", growth_interval=400)

    # ---- what was seen ---------------------------------------------------------------------------------------------

    def seen(self) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        state = optimizer.state_dict()["state"]
        params = dict(self.engine.module.named_parameters())
        whole = {name: _whole(param.detach()) for name, param in sorted(params.items())}
        moments = {
            f"{number}.{key}": _digest(value)
            for number, own in sorted(state.items())
            for key, value in sorted(own.items())
            if isinstance(value, torch.Tensor)
        }
        return {
            **self._recorded,
            "engine": type(self.engine).__module__,
            "digests": {**moments, **{name: _digest(value) for name, value in whole.items()}},
            "squares": {name: float(value.double().square().sum()) for name, value in whole.items()},
            "stats": getattr(optimizer, "stats", dict)(),
            "printed": self._printed.getvalue(),
        }

    def _step(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._worker.set_loss_fn(_loss(change))
        with contextlib.redirect_stdout(self._printed):
            output = self._worker.train_batch(_batch(self._numbers))
        self._numbers += 1
        for kind, name in (("losses", "loss"), ("norms", "grad_norm"), ("lrs", "lr")):
            self._recorded[kind].append(output["metrics"][name])


def _loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    from verl.workers.utils.losses import sft_loss

    def changed(model_output: Any, **given: Any) -> Any:
        if "values" in model_output:  # a critic's
            return change((model_output["values"].values() - 1.0).square().mean()), {}
        loss, metrics = sft_loss(config=None, model_output=model_output, **given)
        return change(loss), metrics

    return changed


def _batch(number: int) -> Any:
    """Returns sequences that can be learned, of different lengths."""
    from verl.utils import tensordict_utils

    first = (number * dist.get_world_size() + dist.get_rank()) * SEQUENCES
    tokens = [(torch.arange(9 + i % 3) * (1 + i % 5) + i) % 97 for i in range(first, first + SEQUENCES)]
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(len(each)) for each in tokens]),
            "loss_mask": nested([torch.ones(len(each)) for each in tokens]),
        },
        {"temperature": 1.0, "update_lr_scheduler": True, "global_token_num": None, "pad_token_id": 0},
    )


@contextlib.contextmanager
def _as_if_away() -> Iterator[None]:
    """Has verl offload to the CPU and come back, as if its device was another one."""
    with contextlib.ExitStack() as stack:
        for name in ASK_FOR_THE_DEVICE:
            stack.enter_context(mock.patch(name, lambda: "cuda"))
        yield


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Lets verl make models without flash attention, and beside TRL 1.16, which lacks a class that verl imports."""
    from transformers import AutoModelForTokenClassification

    def load(*given: Any, **options: Any) -> Any:
        return from_pretrained(*given, **{**options, "attn_implementation": "eager"})

    from_pretrained = AutoModelForTokenClassification.from_pretrained
    with (
        mock.patch("verl.models.transformers.monkey_patch.is_trl_available", lambda: False),
        mock.patch.object(AutoModelForTokenClassification, "from_pretrained", load),
    ):
        yield


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(_whole(value).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
