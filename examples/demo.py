"""The demo: fine-tunes a language model with superoffload.AdamW and with torch.optim.AdamW, and compares the two.

    python examples/demo.py                     # what `make demo` runs: some two minutes on two processors
    python examples/demo.py --data notes.txt    # fine-tunes on a text of yours

A small transformer is first trained on Python's own standard library for a minute, since no step of a young model is
like those of fine-tuning. Then three runs fine-tune it from the same weights on the same batches: torch's optimizer,
ours while backward is running, and ours after backward. The loss curves must agree, and the bits of our two must be
equal. It writes demo.png and timeline.json (for ui.perfetto.dev). On processors alone, backward and the optimizer share
cores and memory, so that nothing is gained by running them together; with a GPU they do not.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

# Threads of torch that spin while they wait would take the processors of the optimizer's worker threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# With a GPU, torch multiplies matrices deterministically only with this setting of cuBLAS.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import superoffload

LAYERS, WIDTH, HEADS = 4, 384, 6
WINDOW, BATCH, MICRO_BATCHES = 64, 8, 2  # a step is 2 micro-batches of 8 windows of 64 bytes
CLIPPED = 0.1  # max_grad_norm is chosen so that about this share of the steps clips
AGREE = 1e-3  # largest difference of the two optimizers' losses, in nats per byte, that counts as rounding


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Model(nn.Module):
    """Predicts the next byte of a text; ``forward`` returns the mean loss in nats per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        before, after = tokens[:, :-1], tokens[:, 1:]
        x = self.blocks(self.bytes(before) + self.places.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), after.flatten())


def read(paths: list[str] | None) -> tuple[Tensor, Tensor]:
    """Returns the text to train on first and the text to fine-tune on, as bytes."""
    library = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    first = b"".join(path.read_bytes() for path in library)
    files = [Path(path) for path in paths or []]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise SystemExit(f"--data {missing[0]}: no such file; expected text files")
    # Without a text of the user's: Python's manual in English, where the first text is code.
    files = files or [library[0].parent / "pydoc_data" / "topics.py"]
    second = b"".join(path.read_bytes() for path in files)
    if len(second) <= WINDOW:
        raise SystemExit(f"--data: {len(second)} bytes of text; expected more than {WINDOW}")
    first_text, second_text = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (first, second))
    return first_text, second_text


class Batches:
    """Draws windows of a text from a seed; int64 [batch, window + 1]."""

    def __init__(self, text: Tensor, seed: int, device: torch.device) -> None:
        self.text, self.device = text, device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        starts = torch.randint(0, len(self.text) - WINDOW, (BATCH, 1), generator=self.generator)
        return self.text[starts + torch.arange(WINDOW + 1)].long().to(self.device)


@dataclass
class Run:
    """What one run of fine-tuning gave: losses and gradient norms by step, and seconds of the steps after the first."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    hidden: float = 0.0  # optimizer seconds behind backward
    exposed: float = 0.0  # optimizer seconds that the step waited for
    stats: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps))

    return LambdaLR(optimizer, factor)


def with_torch(model: Model, batches: Batches, steps: int, lr: float, max_norm: float) -> Run:
    """The loop as it is without superoffload."""
    run = Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)
    schedule = warmup_cosine(optimizer, steps)
    for step in range(steps):
        began = time.perf_counter()
        losses = []
        for _ in range(MICRO_BATCHES):
            loss = model(batches.next())
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        backward_ended = time.perf_counter()
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        now = time.perf_counter()
        run.losses.append(float(sum(losses)) / MICRO_BATCHES)
        optimizer.zero_grad()
        schedule.step()
        if step > 0:  # the first step makes the state
            run.exposed += now - backward_ended
            run.seconds += time.perf_counter() - began
    return run


def with_superoffload(
    model: Model, batches: Batches, steps: int, lr: float, max_norm: float, speculation: str, trace: Path | None = None
) -> Run:
    """The same loop: another optimizer, which also clips, and accumulate() around all but the last micro-batch."""
    run = Run()
    optimizer = superoffload.AdamW(
        model.parameters(), lr, weight_decay=0.1, max_grad_norm=max_norm, speculation=speculation, trace=trace
    )
    schedule = warmup_cosine(optimizer, steps)
    first: dict[str, Any] = {}
    for step in range(steps):
        began = time.perf_counter()
        losses = []
        for micro_batch in range(MICRO_BATCHES):
            with optimizer.accumulate() if micro_batch < MICRO_BATCHES - 1 else nullcontext():
                loss = model(batches.next())
                (loss / MICRO_BATCHES).backward()
                losses.append(loss.detach())
        optimizer.step()
        run.losses.append(float(sum(losses)) / MICRO_BATCHES)
        run.norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
        schedule.step()
        if step == 0:
            first = optimizer.stats()
        else:
            run.seconds += time.perf_counter() - began
    run.stats, run.digests = optimizer.stats(), optimizer.state_digests()
    busy, run.exposed = (run.stats[name] - first[name] for name in ("optimizer_seconds", "optimizer_seconds_exposed"))
    run.hidden = max(0.0, busy - run.exposed)
    optimizer.close()
    return run


def draw(path: Path, torchs: Run, ours: Run, after_backward: Run, max_norm: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    loss, norm, times = figure.subplots(3, 1, height_ratios=[3, 2, 1.4])
    steps = range(1, len(ours.losses) + 1)
    loss.plot(steps, torchs.losses, color="#a9c6e6", linewidth=6, label="torch.optim.AdamW")
    loss.plot(steps, ours.losses, color="#1d2733", linewidth=1.2, label="superoffload.AdamW")
    worst = max(abs(a - b) for a, b in zip(torchs.losses, ours.losses, strict=True))
    loss.set_title(f"Fine-tuning loss in nats per byte; the curves differ by at most {worst:.1e}", loc="left")
    loss.legend(frameon=False)
    norm.plot(steps, ours.norms, color="#2563a8", linewidth=1.2)
    norm.axhline(max_norm, color="#d9772b", linewidth=1.2)
    clipped = sum(value > max_norm for value in ours.norms)
    norm.set_title(f"Gradient norm; {clipped} of {len(steps)} steps were clipped (above the line)", loc="left")
    norm.set_xlabel("step")
    rows = {"torch.optim.AdamW": torchs, "superoffload, after backward": after_backward, "superoffload": ours}
    counted = max(1, len(steps) - 1)
    hidden = [1e3 * run.hidden / counted for run in rows.values()]
    exposed = [1e3 * run.exposed / counted for run in rows.values()]
    times.barh(list(rows), exposed, color="#d9772b", label="the step waits for it")
    times.barh(list(rows), hidden, left=exposed, color="#2f8f5b", label="behind backward")
    times.set_title("Clipping and optimizer, milliseconds a step", loc="left")
    times.set_xlim(0, 1.45 * max(a + b for a, b in zip(hidden, exposed, strict=True)))
    times.legend(frameon=False, loc="center right")
    for axes in (loss, norm, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def sentence(torchs: Run, ours: Run, after_backward: Run, max_norm: float) -> str:
    counted = max(1, len(ours.losses) - 1)
    worst = max(abs(a - b) for a, b in zip(torchs.losses, ours.losses, strict=True))
    clipped = sum(norm > max_norm for norm in ours.norms)
    busy = 1e3 * (ours.hidden + ours.exposed) / counted
    return (
        f"In {len(ours.losses)} steps, {clipped} of them clipped, the losses of superoffload.AdamW and "
        f"torch.optim.AdamW differed by at most {worst:.1e}; of {busy:.1f} ms of optimizer work a step "
        f"{1e3 * ours.hidden / counted:.1f} ms were hidden behind backward and {1e3 * ours.exposed / counted:.1f} ms "
        f"exposed (after backward: {1e3 * after_backward.exposed / counted:.1f} ms, torch with clipping: "
        f"{1e3 * torchs.exposed / counted:.1f} ms), a step took {1e3 * ours.seconds / counted:.0f} ms "
        f"(torch: {1e3 * torchs.seconds / counted:.0f} ms), and stepping during backward left every bit of masters, "
        "moments and parameters as stepping after it does."
    )


def problems(torchs: Run, ours: Run, after_backward: Run) -> list[str]:
    found = []
    worst = max(abs(a - b) for a, b in zip(torchs.losses, ours.losses, strict=True))
    if not worst <= AGREE:
        found.append(f"the losses of the two optimizers differ by {worst:.1e}, more than {AGREE:g}")
    if ours.digests != after_backward.digests:
        found.append("stepping during backward and after it gave different bits")
    if not ours.stats["buckets_committed"]:
        found.append("no bucket was stepped during backward and kept")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/demo", help="folder of demo.png and timeline.json")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="text files to fine-tune on")
    parser.add_argument("--first-steps", type=int, default=150, help="of training from random weights")
    parser.add_argument("--steps", type=int, default=80, help="of each run of fine-tuning")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where torch has one)")
    args = parser.parse_args()
    if min(args.steps, args.first_steps) < 5:
        raise SystemExit(f"--steps {args.steps}, --first-steps {args.first_steps}: expected at least 5 of each")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)  # so that equal runs have equal gradients
    torch.manual_seed(0)
    first_text, second_text = read(args.data)

    model = Model().to(device)
    numel = sum(param.numel() for param in model.parameters())
    print(
        f"training a model of {numel / 1e6:.1f} M parameters from random weights for {args.first_steps} steps",
        flush=True,
    )
    first = with_superoffload(model, Batches(first_text, 1, device), args.first_steps, 1e-3, 1.0, "adaptive")
    print(f"  loss {first.losses[0]:.2f} -> {first.losses[-1]:.2f} nats per byte")
    max_norm = quantiles(first.norms[-max(5, args.first_steps // 4) :], n=100)[int(100 * (1 - CLIPPED)) - 1]

    print(f"fine-tuning it three times for {args.steps} steps, max_grad_norm={max_norm:.2f}", flush=True)
    runs = []
    for name in ("torch", "always", "never"):
        copied, batches = copy.deepcopy(model), Batches(second_text, 2, device)
        common = (copied, batches, args.steps, 3e-4, max_norm)
        trace = out / "timeline.json" if name == "always" else None
        runs.append(with_torch(*common) if name == "torch" else with_superoffload(*common, name, trace))
        print(f"  {name}: loss {runs[-1].losses[0]:.3f} -> {runs[-1].losses[-1]:.3f}", flush=True)
    torchs, ours, after_backward = runs
    try:
        draw(out / "demo.png", torchs, ours, after_backward, max_norm)
        print(f"picture: {out / 'demo.png'}")
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (pip install matplotlib)")
    print(sentence(torchs, ours, after_backward, max_norm))
    found = problems(torchs, ours, after_backward)
    for problem in found:
        print(f"FAILED: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
