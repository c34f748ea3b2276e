"""Accelerate, Lightning and PEFT in one process: the same code with our optimizer and with torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import assert_trained_alike, batch, model_of

Make = Callable[[Any], Any]
MAKERS: dict[str, Make] = {
    "always": lambda params: AdamW(params, lr=1e-3, speculation="always", threads=1),
    "never": lambda params: AdamW(params, lr=1e-3, speculation="never", threads=1),
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-3),
}

NUMBERS: Any = torch.arange(8)
SEEDS: Any = torch.utils.data.DataLoader(NUMBERS, batch_size=1)


def compare(train: Callable[[Make], tuple[nn.Module, Any]]) -> None:
    """``train(make)`` returns the trained model and its optimizer."""
    found = {}
    for name, make in MAKERS.items():
        model, optimizer = train(make)
        if isinstance(optimizer, AdamW):
            assert optimizer.stats()["steps"] > 0
            found[name] = (model, optimizer.state_digests())
            optimizer.close()
        else:
            found[name] = (model, {})
    assert found["always"][1] == found["never"][1]
    assert_trained_alike(found["always"][0], found["torch"][0])


def accelerator_of(**options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


@pytest.mark.over_stand_in(brings_back="always")
def test_accelerate(tmp_path: Path) -> None:
    """Accumulation, clipping by Accelerate, a scheduler; saved, and loaded a few steps later."""

    def train(make: Make) -> tuple[nn.Module, Any]:
        accelerator = accelerator_of(gradient_accumulation_steps=2)
        model = model_of()
        inner = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, inner, scheduler)
        for seed in range(10):
            if seed == 4:
                accelerator.save_state(str(tmp_path / str(id(make))))
            with accelerator.accumulate(model):
                accelerator.backward(batch(model, seed))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if seed == 7:  # back to the fourth
                accelerator.load_state(str(tmp_path / str(id(make))))
        return accelerator.unwrap_model(model), inner

    compare(train)


@pytest.mark.over_stand_in
def test_accelerates_windows() -> None:
    """It says where they end, so that nothing is stepped too early; the last one is shorter."""

    def train(make: Make) -> tuple[nn.Module, Any]:
        accelerator = accelerator_of(gradient_accumulation_steps=3)
        plain = model_of()
        inner = make(plain.parameters())
        model, optimizer, seeds = accelerator.prepare(plain, inner, SEEDS)
        for seed in (one for _ in range(2) for one in seeds):
            with accelerator.accumulate(model):
                accelerator.backward(batch(model, int(seed)))
                optimizer.step()
                optimizer.zero_grad()
        assert not isinstance(inner, AdamW) or inner.stats()["steps"] == 6
        return plain, inner

    compare(train)


def test_a_window_that_was_left_half_way_is_another_loops() -> None:
    """The first step shows it; from then on backward overlaps as ever, until Accelerate begins another window."""
    state = accelerator_of().gradient_state
    model, overlapped, told = model_of(), [], []
    with AdamW(model.parameters(), speculation="always", threads=1) as optimizer:
        for state.sync_gradients in (False, False, False, True, False, False):
            before = optimizer.stats()["buckets_speculated"]
            batch(model, 1).backward()
            overlapped.append(optimizer.stats()["buckets_speculated"] > before)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            told.append(any("sync_gradients=False" in str(one.message) for one in caught))
            optimizer.zero_grad()
    assert overlapped == [False, True, True, True, False, True]
    assert told == [True, False, False, False, False, False]


def test_accelerate_does_not_take_the_state_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """prepare() does so with a state_dict() and a load; state that is there already stays as it is."""
    placed: list[Any] = []

    def place(state: Any, device: torch.device) -> Any:
        placed.append(state)
        return state

    monkeypatch.setattr("accelerate.optimizer.move_to_device", place)
    model = model_of()
    with AdamW(model.parameters(), threads=1) as inner:
        batch(model, 0).backward()
        inner.step()
        before, groups = inner.state_digests(), inner.param_groups
        optimizer = accelerator_of().prepare(inner)
        assert placed == [{"state": {}, "param_groups": []}]
        assert inner.state_digests() == before and inner.param_groups is groups
        saved = optimizer.state_dict()
        assert len(saved["state"]) == len(list(model.parameters()))
        optimizer.load_state_dict({**saved, "state": {}})
        assert inner.state_digests() != before, "a wrapper's other calls are not left out"


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accelerates_scheduler_does_not_move_after_a_skipped_step(precision: str) -> None:
    """Without a scaler of Accelerate's, too, and also with one that leaves it to us to skip."""
    accelerator = accelerator_of()
    stock = accelerator.prepare(torch.optim.AdamW(model_of().parameters()))
    if precision == "fp16":  # it makes none on the CPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = model_of()
    inner = AdamW(model.parameters(), threads=1)
    optimizer, scheduler = accelerator.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 1, 0.5))
    rates, skipped = [], []
    for seed in range(7):
        loss = batch(model, seed)
        if seed != 4 or precision != "no":  # torch's scaler refuses a step without gradients
            accelerator.backward(loss * torch.nan if seed in (2, 3) else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(inner.param_groups[0]["lr"])
        skipped.append(optimizer.step_was_skipped)
        assert stock.step_was_skipped is False
    inner.close()
    assert skipped == [False, False, True, True, False, False, False]
    assert rates == [1e-3 * 0.5**moves for moves in (1, 2, 2, 2, 3, 4, 5)]


def lightning_module(lightning: Any, make: Make, *, automatic: bool) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()
            self.automatic_optimization = automatic

        def training_step(self, seed: Tensor, index: int) -> Tensor | None:
            loss = batch(self.net, 2 * self.trainer.global_step + index % 2)
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
            return None

        def configure_optimizers(self) -> Any:
            self.made = make(self.net.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(self.made, 3, 0.5)
            return [self.made], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


def lightning_trainer(lightning: Any, folder: Path, **options: Any) -> Any:
    options.setdefault("enable_checkpointing", False)
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), **options,
    )  # fmt: skip


@pytest.mark.over_stand_in(brings_back="always")
@pytest.mark.parametrize(
    ("automatic", "precision"),
    [(True, "32-true"), (False, "bf16-mixed"), (True, "16-mixed")],
    ids=["automatic", "manual-bf16", "automatic-fp16"],
)
def test_lightning(automatic: bool, precision: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
    from lightning.pytorch.plugins import MixedPrecision

    def train(make: Make) -> tuple[nn.Module, Any]:
        module = lightning_module(lightning, make, automatic=automatic)
        options: Any = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2} if automatic else {}
        if precision != "32-true":  # the first with a scaler and clipping by its unscale_(), the second without
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if precision == "16-mixed" else None
            options["plugins"] = MixedPrecision(precision, "cpu", scaler=scaler)
        lightning_trainer(lightning, tmp_path, **options).fit(module, SEEDS)
        return module.net, module.made

    compare(train)


def test_lightning_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
    keep = lightning.callbacks.ModelCheckpoint(str(tmp_path), "{step}", every_n_train_steps=4, save_top_k=-1)
    digests = []
    for options in ({"callbacks": [keep], "enable_checkpointing": True}, {}):
        module = lightning_module(lightning, MAKERS["always"], automatic=True)
        trainer = lightning_trainer(lightning, tmp_path, **options)
        trainer.fit(module, SEEDS, ckpt_path=None if options else str(tmp_path / "step=4.ckpt"))
        assert module.made.stats()["steps"] == (8 if options else 4)
        digests.append(module.made.state_digests())
        module.made.close()
    assert digests[0] == digests[1]


@pytest.mark.over_stand_in
def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

    def train(make: Make) -> tuple[nn.Module, Any]:
        inner = model_of()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["0", "3"], lora_dropout=0.0)
        model = peft.get_peft_model(inner, config)
        base = model.base_model.model[0].base_layer.weight.detach().clone()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        for seed in range(6):
            optimizer.zero_grad()
            with_dtype = model.base_model.model
            batch(with_dtype, seed).backward()
            optimizer.step()
        assert torch.equal(model.base_model.model[0].base_layer.weight, base)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 4 * (16 + 48 + 48 + 4)
        return model, optimizer

    compare(train)
