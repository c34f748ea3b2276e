"""offload(trainer): Trainer and trainers of TRL train with our optimizer, as with torch's and clipping by Trainer;
where they generate, the optimizer may sleep meanwhile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError
from superoffload.metrics import PER_STEP, TOTALS
from tests.support.checkout import ROOT
from tests.support.hugging_face import (
    NEEDS,
    Counting,
    end,
    generating,
    logs_of,
    model_of,
    sft,
    trainer_of,
    transformers,
)
from tests.support.optional_packages import needs
from tests.support.over_stand_in import only_over_stand_in

pytestmark = pytest.mark.skipif(transformers is None, reason=NEEDS)


def offload(trainer: Any, **options: Any) -> None:
    from superoffload.integrations import transformers as adapter

    adapter.offload(trainer, **options)


def check_curves(runs: dict[str | None, Any]) -> None:
    """Of runs that speculate "always", "never", and of torch's AdamW (None): our bits are the same, losses torch's."""
    ours, theirs = logs_of(runs["always"]), logs_of(runs[None])
    assert len(ours) == len(theirs) == runs[None].args.max_steps
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
        assert mine["learning_rate"] == other["learning_rate"]
    assert ours[-1]["loss"] < ours[0]["loss"] and ours[-1]["superoffload/skipped_steps"] == 0
    clipped = sum(entry["grad_norm"] > runs[None].args.max_grad_norm for entry in ours)
    assert 0 < clipped / len(ours) == pytest.approx(ours[-1]["superoffload/clip_rate"])
    assert end(runs["always"]) == end(runs["never"])


@pytest.mark.over_stand_in
@only_over_stand_in(kind=("llama", "SFT"))
@pytest.mark.parametrize("kind", ["llama", "qwen", pytest.param("SFT", marks=needs("trl", "datasets"))])
def test_trainer(kind: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.4} if kind == "llama" else {"max_steps": 5}
    runs: dict[str | None, Any] = {}
    for mode in ("always", "never", None):
        if kind == "SFT":
            runs[mode] = sft(tmp_path, model_of, max_steps=6, max_grad_norm=1.0)
        else:
            runs[mode] = trainer_of(tmp_path, model_of(kind), None, **options)
        if mode is not None:
            offload(runs[mode], speculation=mode, threads=1)
        runs[mode].train()
    check_curves(runs)


def test_delivery_on_demand(tmp_path: Path) -> None:
    """Evaluations and checkpoints on the way included; nothing reads a parameter too early."""
    digests, losses, weights = [], [], []
    for delivery in ("eager", "on_demand"):
        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer = trainer_of(tmp_path, model_of("gpt-oss"), None, max_steps=6, eval_steps=3, **saving)
        trainer.args.eval_strategy = "steps"
        trainer.eval_dataset = torch.utils.data.Subset(Counting(), range(8))
        offload(trainer, speculation="never", threads=1, delivery=delivery)
        trainer.train()
        weights.append([param.detach().clone() for param in trainer.model.parameters()])
        losses.append([entry.get("eval_loss", entry.get("loss")) for entry in trainer.state.log_history])
        digests.append(end(trainer))
    assert digests[0] == digests[1]
    assert losses[0] == losses[1] and len(losses[0]) > 8
    assert all(map(torch.equal, *weights)), "of the last step, when training ends"


def test_a_handful_of_metrics_is_logged_and_others_on_request(tmp_path: Path) -> None:
    from superoffload.integrations.transformers import LOGGED

    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?m)^\| `superoffload/(\w+)` \|", page)) == set(LOGGED)
    some: tuple[Any, ...] = ("steps", "grad_norm")
    for metrics, names in ((True, LOGGED), (False, ()), ("all", (*TOTALS, *PER_STEP)), (some, some)):
        trainer = trainer_of(tmp_path, model_of(), "never", metrics=metrics, max_steps=1)
        trainer.train()
        logged = {key for key in logs_of(trainer)[0] if key.startswith("superoffload/")}
        assert logged == {f"superoffload/{name}" for name in names}
        end(trainer)
    trainer = trainer_of(tmp_path, model_of(), None)
    for wrong in ("grad_norm", ["grad_norms"], 3, None):
        with pytest.raises(ArgumentError, match=r"metrics: .*expected True, False, 'all' or a list out of"):
            offload(trainer, metrics=wrong)


@pytest.mark.over_stand_in
def test_resume(tmp_path: Path) -> None:
    """To the bit, and counters go on."""
    saving: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    straight = trainer_of(tmp_path, model_of(dtype=torch.bfloat16), "always", "all", **saving)
    straight.train()
    resumed = trainer_of(tmp_path, model_of(dtype=torch.bfloat16), "never", "all", max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    mine, whole = logs_of(resumed)[-3:], logs_of(straight)[3:]
    for name in ("loss", "superoffload/steps", "superoffload/clipped_steps", "superoffload/clip_rate"):
        assert [entry[name] for entry in mine] == [entry[name] for entry in whole], name
    assert end(resumed) == end(straight)


def test_checkpoints_are_saved_without_a_copy_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, save = list[Any](), torch.save

    def remembering(what: Any, *where: Any) -> None:
        saved.append(what)
        save(what, *where)

    monkeypatch.setattr(torch, "save", remembering)
    trainer = trainer_of(tmp_path, model_of(), "always", max_steps=3, save_strategy="steps", save_steps=3)
    trainer.train()
    (states,) = (what["state"] for what in saved if isinstance(what, dict) and "param_groups" in what)
    ours = trainer.optimizer.optimizer
    shown = [ours.state[param]["exp_avg"] for group in ours.param_groups for param in group["params"]]
    assert [state["exp_avg"].data_ptr() for state in states.values()] == [each.data_ptr() for each in shown]
    copied = trainer.optimizer.state_dict()["state"]
    assert copied[0]["exp_avg"].data_ptr() != shown[0].data_ptr(), "only Trainer's own checkpoints"
    end(trainer)


def test_on_several_gpus_checkpoints_are_mapped_into_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trainer_of(tmp_path, model_of(), "always", max_steps=3, save_strategy="steps", save_steps=3)
    saved.train()
    resumed = trainer_of(tmp_path, model_of(), "never", max_steps=6)
    resumed.create_optimizer_and_scheduler(6)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    monkeypatch.setattr(transformers.TrainingArguments, "device", torch.device("meta"))  # holds no values
    load, how = torch.load, list[bool]()

    def mapped(*file: Any, **options: Any) -> Any:
        how.append(options["mmap"])
        return load(*file, **options)

    monkeypatch.setattr(torch, "load", mapped)
    resumed._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-3"))
    assert how == [True, True]  # so that no copy of the state is read, nor of the schedule
    found = [value["exp_avg_sq"] for value in resumed.optimizer.state_dict()["state"].values()]
    expected = [value["exp_avg_sq"] for value in saved.optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, found, expected)) and len(found) > 0
    end(saved)
    resumed.optimizer.close()


def test_a_file_that_is_open_already_is_read(tmp_path: Path) -> None:
    """Transformers has torch.distributed.checkpoint read those of FSDP2's sharded checkpoints."""
    from superoffload.integrations.transformers import on_host

    path, found = tmp_path / "state.pt", list[torch.Tensor]()
    torch.save(torch.arange(4), path)

    def load() -> None:
        with path.open("rb") as file:
            found.extend([torch.load(file, map_location="meta"), torch.load(str(path), "meta", weights_only=True)])

    on_host(load)()
    assert [one.tolist() for one in found] == [[0, 1, 2, 3]] * 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    def trainer(attributes: dict[str, Any], **options: Any) -> Any:
        made = trainer_of(tmp_path, model_of(), None, **options)
        vars(made).update(attributes)
        return made

    for given, options, words in (
        (trainer({}, optim="adafactor"), {}, "optim='adafactor'"),
        (trainer({"optimizer": torch.optim.SGD([torch.ones(1)])}), {}, "it has an optimizer already"),
        (trainer({"is_deepspeed_enabled": True}), {}, "use superoffload.integrations.deepspeed.enable"),
        (trainer({}), {"max_grad_norm": 1.0}, "belongs into TrainingArguments"),
        (trainer({}), {"replicated": "shard"}, "Trainer saves the state on the first rank alone"),
        (model_of(), {}, "expected a transformers.Trainer"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            offload(given, **options)
    replaced = trainer_of(tmp_path, model_of(), "always")
    replaced.optimizer = torch.optim.SGD(replaced.model.parameters())
    with pytest.raises(ArgumentError, match=r"expected offload\(\)'s AdamW; set no other"):
        replaced.train()


@pytest.mark.over_stand_in
@only_over_stand_in(family="llama", masters=True)
@pytest.mark.parametrize(("family", "masters"), [("llama", True), ("qwen", False)])
def test_from_pretrained_loads_what_was_exported(family: str, masters: bool, tmp_path: Path) -> None:
    model = model_of(family, torch.bfloat16)
    with AdamW(model.parameters(), lr=1e-2, threads=1) as optimizer:
        for index in range(3):
            optimizer.zero_grad()
            tokens = Counting()[index]["input_ids"][None]
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        checkpoints.export_weights(tmp_path, model, optimizer)
        checkpoints.export_weights(tmp_path, model, optimizer, masters=masters)  # over it, as when exported repeatedly
        dtype = torch.float32 if masters else torch.bfloat16
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for (name, mine), (other, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
            assert name == other
            assert torch.equal(theirs, optimizer.state[mine]["master"] if masters else mine)
    with pytest.raises(ArgumentError, match="masters=True needs optimizer"):
        checkpoints.export_weights(tmp_path, model, masters=True)


WITH_TRL = needs("trl", "datasets")


def trainer_that_generates(folder: Path, kind: str = "GRPO", **options: Any) -> Any:
    return generating(kind, folder, lambda: model_of("qwen", torch.bfloat16), **options)


def offloaded(trainer: Any, **options: Any) -> Any:
    offload(trainer, threads=1, **options)
    return trainer


@pytest.mark.over_stand_in
@WITH_TRL
@only_over_stand_in(kind="GRPO")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_same_bits_asleep_or_awake_and_trls_own_losses(kind: str, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "never": {"speculation": "never"},
        "asleep": {"speculation": "always", "sleep": True},
    }
    logs, digests = {}, {}
    slept: list[AdamW] = []
    sleep = AdamW.sleep

    def noting(self: AdamW) -> None:
        slept.append(self)
        sleep(self)

    for name, options in ways.items():
        trainer = offloaded(trainer_that_generates(tmp_path, kind), **options)
        with mock.patch.object(AdamW, "sleep", noting):
            trainer.train()
        logs[name] = [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in logs_of(trainer)]
        digests[name] = end(trainer)
    assert len(slept) == 3, "once for each step: two micro-batches share what was generated"
    assert len(logs["never"]) == 3 and any(norm > 0.5 for _, norm, _ in logs["never"])
    assert digests["asleep"] == digests["never"] and logs["asleep"] == logs["never"]
    theirs = trainer_that_generates(tmp_path, kind)
    theirs.train()
    first = logs_of(theirs)[0]  # later ones are of other samples
    assert logs["never"][0] == pytest.approx((first["loss"], first["grad_norm"], first["reward"]), rel=1e-2, abs=1e-6)


@WITH_TRL
def test_an_evaluation_generates_too_and_an_error_leaves_the_optimizer_awake(tmp_path: Path) -> None:
    evaluations: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = trainer_that_generates(tmp_path, max_steps=2, **evaluations)
    generate = trainer._generate

    def generate_until_the_end(*args: Any, **options: Any) -> Any:
        if trainer.state.global_step == 2:
            raise RuntimeError("no room")
        return generate(*args, **options)

    trainer._generate = generate_until_the_end
    offloaded(trainer, sleep=True)
    before = trainer.evaluate()
    with pytest.raises(RuntimeError, match="no room"):
        trainer.train()
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(rewards) == 1 and 0 <= before["eval_reward"] <= 1
    optimizer = trainer.optimizer.optimizer
    optimizer.refresh_masters()  # no StateError: it is awake
    optimizer.close()


@WITH_TRL
def test_where_it_cannot_sleep(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"sleep: Trainer does not generate, .* a trainer like TRL's GRPO"):
        offloaded(trainer_of(tmp_path, model_of(), None), sleep=True)
    online = trainer_of(tmp_path, model_of(), None)
    online._generate = mock.Mock()  # as TRL's OnlineDPOTrainer has, which calls it in every micro-batch
    with pytest.raises(ArgumentError, match="not between two steps"):
        offloaded(online, sleep=True)
    trainer = trainer_that_generates(tmp_path, steps_per_generation=3)
    with pytest.raises(ArgumentError, match=r"sleep='.*none': expected True or False"):
        offloaded(trainer, sleep=str(tmp_path / "none"))
    with pytest.raises(ArgumentError, match=r"sleep: it generates every 3 micro-batches .* a multiple of .*, 2"):
        offloaded(trainer, sleep=True)
    offloaded(trainer, sleep=None)  # awake, it works
