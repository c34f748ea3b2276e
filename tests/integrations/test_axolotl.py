"""The plugin for Axolotl: its settings, what it refuses, and Axolotl's own trainer with and without it.

They need Axolotl and addict (requirements/axolotl.txt).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.hugging_face import Counting, end, logs_of, model_of, tokenizer_of, transformers
from tests.support.optional_packages import needs

pytestmark = [needs("axolotl", "addict", "transformers", "peft", "trl", "datasets")]

NAME = "superoffload.integrations.axolotl.SuperOffloadPlugin"
BASE = {
    "base_model": "model",
    "datasets": [{"path": "text.jsonl", "ds_type": "json", "type": "completion", "field": "text"}],
    "sequence_len": 32,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "learning_rate": 3e-3,
    "plugins": [NAME],
}
OURS = {"speculation": "always", "threads": 1, "bucket_numel": 256}


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Axolotl's plugins, which it keeps for the whole process: none before and after a test."""
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    from axolotl.integrations.base import PluginManager

    plugins = PluginManager.get_instance()
    plugins.plugins.clear()
    yield plugins
    plugins.plugins.clear()


def configured(**settings: Any) -> Any:
    """The configuration as Axolotl makes it from YAML, plugins included."""
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    given = DictDefault({**BASE, **settings})
    prepare_plugins(given)
    return validate_config(given)


def axolotl_trainer(folder: Path, **options: Any) -> Any:
    """Axolotl's trainer with its arguments; numba, which it imports to pack samples, may be missing."""
    if find_spec("numba") is None and "axolotl.core.trainers.base" not in sys.modules:
        stand_in = types.ModuleType("numba")
        vars(stand_in)["njit"] = lambda function: function
        sys.modules["numba"] = stand_in
        try:
            import_module("axolotl.core.trainers.base")
        finally:
            del sys.modules["numba"]
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args_base import AxolotlTrainingMixins

    datasets = import_module("datasets")
    rows = [Counting()[index] for index in range(64)]
    kind = make_dataclass("Arguments", [], bases=(AxolotlTrainingMixins, transformers.TrainingArguments))
    values: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.85, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "optim": "adamw_torch_fused", "seed": 3,
    }  # fmt: skip
    return AxolotlTrainer(
        model=model_of(),
        args=kind(**{**values, **options}),
        train_dataset=datasets.Dataset.from_list(
            [{"input_ids": entry["input_ids"].tolist(), "labels": entry["labels"].tolist()} for entry in rows]
        ),
        processing_class=tokenizer_of(),
        data_collator=transformers.default_data_collator,
        bench_data_collator=None,
        eval_data_collator=None,
    )


def test_axolotls_trainer_trains_as_without_the_plugin(tmp_path: Path, manager: Any) -> None:
    runs = {}
    for mode in (None, "never", "always"):
        trainer = axolotl_trainer(tmp_path)
        if mode is not None:
            section = {**OURS, "speculation": mode, "metrics": "all"}
            manager.post_trainer_create(configured(superoffload=section), trainer)
        trainer.train()
        runs[mode] = trainer
    ours, theirs = logs_of(runs["always"]), logs_of(runs[None])
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert {entry["grad_norm"] > 0.85 for entry in ours} == {True, False}  # some steps are clipped, others not
    assert [entry["superoffload/steps"] for entry in ours] == [1, 2, 3, 4, 5, 6]  # of metrics="all"
    assert logs_of(runs["never"])[-1]["superoffload/buckets_speculated"] == 0
    assert end(runs["always"]) == end(runs["never"])


def test_groups_are_those_without_the_plugin(tmp_path: Path, manager: Any) -> None:
    """Here without a section, so that the defaults hold."""
    in_groups = [{"name": "mlp", "modules": ["mlp"], "lr": 1e-3}]
    for options in ({}, {"embedding_lr": 5e-4}, {"lr_groups": in_groups}):
        found = []
        for plugged in (True, False):
            trainer = axolotl_trainer(tmp_path, **options)
            if plugged:
                manager.post_trainer_create(configured(), trainer)
            optimizer = trainer.create_optimizer()
            assert isinstance(optimizer, AdamW) == plugged
            found.append(
                [(len(group["params"]), group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
            )
            getattr(optimizer, "close", lambda: None)()
        assert found[0] == found[1]


def test_the_section_has_every_argument_that_yaml_can_express_and_its_words() -> None:
    from superoffload.integrations.axolotl import Options

    of_trainer = {"params", "lr", "betas", "eps", "weight_decay", "max_grad_norm", "module", "model"}
    arguments = set(inspect.signature(AdamW).parameters) - of_trainer - {"process_group", "torchs"}
    assert set(Options.model_fields) == arguments | {"metrics", "sleep"}
    tried = 0
    for name in ("speculation", "rank_check", "state_dtype", "master_dtype", "accumulate_dtype"):
        parts = get_args(Options.model_fields[name].annotation)
        for word in {word for part in parts for word in get_args(part) if isinstance(word, str)}:
            given: dict[str, Any] = {name: word}
            AdamW([torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))], threads=1, **given).close()
            tried += 1
    assert tried > 8


def test_what_does_not_fit_is_refused(tmp_path: Path, manager: Any) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"superoffload": {"speculatoin": "never"}}, "speculatoin='never': no such setting, expected"),
        ({"superoffload": {"speculation": "sometimes"}}, "'adaptive', 'always' or 'never'"),
        ({"superoffload": {"threads": True}}, "superoffload.threads"),
        ({"superoffload": 3}, "superoffload"),
        ({"superoffload": {"lr": 1.0}}, "lr=1.0: set learning_rate at the configuration's top level"),
        ({"superoffload": {"metrics": ["grad_norms"]}}, "metrics: 'grad_norms', expected"),
        ({"optimizer": "adamw_torch_8bit"}, "optimizer: 'adamw_torch_8bit', expected 'adamw_torch_fused'"),
        ({"optimizer": "muon"}, "optimizer: 'muon', expected 'adamw_torch_fused'"),
        ({"optim_args": "a=1"}, "optim_args: 'a=1', expected none"),
        ({"deepspeed": "zero3.json"}, "deepspeed: 'zero3.json', expected none"),
        ({"fsdp_config": {"reshard_after_forward": True}, "fsdp_version": 1}, "fsdp_version: 1, expected 2"),
        ({"relora": True, "jagged_restart_steps": 2, "adapter": "lora"}, "relora: True, expected false"),
    ]
    for settings, words in bad:
        with pytest.raises(ValueError) as caught:
            configured(**settings)
        assert words in str(caught.value)
    fsdp2 = configured(fsdp_config={"reshard_after_forward": True}, fsdp_version=2)
    trainer = axolotl_trainer(tmp_path)
    # Axolotl gives its own optimizers to the trainer's constructor and leaves args.optim at AdamW
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 1.0})
    with pytest.raises(ArgumentError, match=r"optimizer_cls_and_kwargs has SGD, expected None"):
        manager.post_trainer_create(fsdp2, trainer)
