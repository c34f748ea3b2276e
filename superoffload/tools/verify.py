"""Runs `superoffload verify`: trains a small model twice and compares every bit of the optimizer after every step.

One run speculates, the other steps after backward. Both meet the same troubles: NaN, Inf, clips, a second backward,
gradients that are dropped, a changed learning rate, an exception before step(). Under torchrun every rank trains its
shard with FSDP2 and compares its own bits.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option, check_writable, write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from superoffload.adamw import AdamW

MODEL = {"width": 64, "layers": 3, "window": 16, "batch": 4, "micro_batches": 2}
BUCKET_NUMEL = 1 << 14  # so that a step of this small model has many buckets
# How a speculated bucket can end; the troubles below cause each of them.
OUTCOMES = {
    "committed": "no clip: the speculated step was kept",
    "undone": "more gradient arrived, or lr changed: the old bits were restored, the bucket stepped later",
    "replayed": "clipped: undone and stepped again with the clip coefficient, in one pass",
    "skipped": "NaN or Inf somewhere: undone, the whole step left out",
    "abandoned": "step() was never called: undone when the gradients were dropped",
}


@dataclass(frozen=True)
class Trouble:
    """What happens in one step.

    ``poison`` multiplies the gradient of the logits (which come first in backward) or, with ``late_poison``, of the
    embeddings (last, when the other buckets are speculated already). ``clip`` is max_grad_norm as a share of the last
    finite norm; a ``late_clip`` is set between backward and step().
    """

    poison: float | None = None
    late_poison: bool = False
    clip: float | None = None
    late_clip: bool = False
    again: bool = False
    drop: bool = False
    lr: float | None = None
    raises: bool = False

    @property
    def keeps_state(self) -> bool:
        """Returns whether the step must leave every bit of the state unchanged."""
        return self.poison is not None or self.raises

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value not in (None, False))


_NAN, _INF = float("nan"), float("inf")
TROUBLES = {
    4: Trouble(poison=_NAN),
    6: Trouble(poison=_INF, late_poison=True),
    8: Trouble(clip=0.5, late_clip=True),
    9: Trouble(clip=0.5, late_clip=True),
    10: Trouble(clip=0.01),
    12: Trouble(again=True),
    14: Trouble(drop=True),
    16: Trouble(lr=0.5),
    18: Trouble(raises=True),
    19: Trouble(poison=_NAN, late_poison=True),
    20: Trouble(clip=0.5, again=True),
    21: Trouble(clip=0.5, late_clip=True, lr=2.0),
    22: Trouble(poison=_INF, drop=True),
    23: Trouble(clip=0.5, late_clip=True),
}
LEAST_STEPS = 24
_NONE = Trouble()
_NEVER_CLIPS = 1e6


class _UserError(Exception):
    """Stands for an exception of a user's own code."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="prove that speculation changes nothing",
        description="Train a small model twice from the same seeds, speculative and synchronous, with NaN, Inf, clips\n"
        "and other trouble on the way, and compare SHA-256 digests of masters, exp_avg, exp_avg_sq and parameters\n"
        "after every step. Exits with 0 only if all are equal and speculated buckets ended in every possible way.\n"
        "Under torchrun, every rank trains and compares its FSDP2 shard:\n"
        "  torchrun --nproc-per-node 2 -m superoffload verify",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_option(parser, "--steps", type=int, default=LEAST_STEPS, help=f"optimizer steps, at least {LEAST_STEPS}")
    parser.add_argument("--device", help="cpu, or cuda (default: cuda where torch has one)")
    add_option(parser, "--dtype", choices=("bf16", "fp32"), default="bf16", help="parameters and gradients")
    add_option(parser, "--state-dtype", choices=("fp32", "bf16", "8bit"), default="fp32", help="of the moments")
    add_option(parser, "--master-dtype", choices=("fp32", "split"), default="fp32", help="of the masters")
    add_option(parser, "--delivery", choices=("eager", "on_demand"), default="eager", help="of new parameters")
    add_option(parser, "--bucket-numel", type=int, default=BUCKET_NUMEL, help="parameters per bucket")
    parser.add_argument("--threads", type=int, help="worker threads of the optimizer (default: its own choice)")
    add_option(parser, "--seed", type=int, default=0, help="of weights, batches and stochastic rounding")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file too")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the counts and the result")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.steps < LEAST_STEPS:
        raise ArgumentError(f"steps={args.steps}: expected at least {LEAST_STEPS}, so that all of the trouble is met")
    if not 0 <= args.seed < 2**32:
        raise ArgumentError(f"seed={args.seed}: expected a whole number from 0 to {2**32 - 1}")
    check_writable(args.json, "json")
    began = time.perf_counter()
    with _ranks(args.device) as (device, rank, ranks), _deterministic():
        say: Callable[[str], None] = print if rank == 0 and not args.quiet else lambda text: None
        result = _of_all_ranks(_compare(args, device, rank, ranks, say), ranks)
    if rank == 0:
        print(result.text(args.steps, ranks, time.perf_counter() - began))
        if args.json:
            write_json(args.json, {**result.as_json(args.steps), "device": str(device), "ranks": ranks})
    status = 0 if result.passed else 1
    if ranks > 1:
        # FSDP2 keeps its groups beyond destroy_process_group(). A thread of gloo that still drops the last collective's
        # tensors needs Python, and aborts the process if Python ends meanwhile (torch 2.13).
        sys.stdout.flush()
        os._exit(status)
    return status


@dataclass(frozen=True)
class Result:
    """``missing``: ways for a bucket to end that did not occur, and so were not compared."""

    problems: list[str]
    missing: list[str]
    digests_compared: int
    stats: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.problems and not self.missing

    def text(self, steps: int, ranks: int, seconds: float) -> str:
        buckets = [f"  speculated {self.stats['buckets_speculated']:>6} buckets"]
        buckets += [f"  {name:<10} {self.stats[f'buckets_{name}']:>6}   {why}" for name, why in OUTCOMES.items()]
        if self.passed:
            on = f" on each of {ranks} ranks" if ranks > 1 else ""
            last = f"verified: all {self.digests_compared} digests{on} are equal, in {steps} steps and {seconds:.1f} s"
            return "\n".join([*buckets, last])
        if self.problems:
            return "\n".join([*buckets, *(f"FAILED: {problem}" for problem in self.problems)])
        what = f"no bucket was {' or '.join(self.missing)}, so that this was not compared"
        last = f"INCONCLUSIVE: nothing differs, but {what}; leave --bucket-numel at its default"
        return "\n".join([*buckets, last])

    def as_json(self, steps: int) -> dict[str, Any]:
        import torch

        from superoffload import __version__, kernels

        return {
            "command": "verify",
            "passed": self.passed,
            "problems": self.problems,
            "not_exercised": self.missing,
            "steps": steps,
            "digests_compared": self.digests_compared,
            "buckets": {name: self.stats[f"buckets_{name}"] for name in ("speculated", *OUTCOMES)},
            "skipped_steps": self.stats["skipped_steps"],
            "instruction_set": kernels.current_isa(),
            "versions": {"superoffload": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }


def _compare(args: argparse.Namespace, device: Any, rank: int, ranks: int, say: Callable[[str], None]) -> Result:
    """Trains twice in lock-step and stops at the first difference, since all later steps differ with it."""
    problems: list[str] = []
    compared = 0
    one, other = (_Run(args, device, rank, ranks, speculation) for speculation in ("always", "never"))
    say(f"training {one.numel:,} {args.dtype} parameters twice on {device}, speculative and synchronous")
    try:
        before = one.optimizer.state_digests()
        for step in range(1, args.steps + 1):
            trouble = TROUBLES.get(step, _NONE)
            one.step(trouble)
            other.step(trouble)
            digests = one.optimizer.state_digests()
            problem = _difference(one, other, digests)
            if not problem and trouble.keeps_state and digests != before:
                changed = ", ".join(part for part in digests if digests[part] != before[part])
                problem = f"the step had to leave everything as it was, but {changed} changed"
            compared += len(digests)
            verdict = "DIFFERENT" if problem else "equal"
            say(f"step {step}/{args.steps}  loss {one.loss:.3f}  {verdict}  {trouble}".rstrip())
            # Together: a rank that stops alone would leave the others waiting.
            if any(_gathered(bool(problem), ranks)):
                problems += [f"step {step} ({trouble}): {problem}"] if problem else []
                break
            before = digests
        stats = one.optimizer.stats()
        problems += _uncounted(stats, other.optimizer.stats())
    finally:
        one.optimizer.close()
        other.optimizer.close()
    missing = [name for name in ("speculated", *OUTCOMES) if not stats[f"buckets_{name}"]]
    return Result(problems, [] if problems else missing, compared, stats)


def _difference(one: _Run, other: _Run, digests: dict[str, str]) -> str:
    if one.loss.hex() != other.loss.hex():  # NaN too
        return "the losses differ, while everything before was equal: forward or backward is not repeatable here"
    others = other.optimizer.state_digests()
    differing = [part for part in digests if digests[part] != others[part]]
    if not differing:
        return ""
    norms = [run.optimizer.grad_norm for run in (one, other)]
    if repr(norms[0]) != repr(norms[1]):
        why = "backward is not repeatable here, or the optimizer sums them wrongly"
        return f"the gradient norms differ, {norms[0]!r} and {norms[1]!r}: {why}"
    return f"equal gradients went in, but {', '.join(differing)} came out different; {_where(one, other)}"


def _where(one: _Run, other: _Run) -> str:
    """Names the parameters whose state differs, with counts of differing elements."""
    import torch

    found = []
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        for part in ("master", "exp_avg", "exp_avg_sq"):
            pair = [run.optimizer.state[param][part] for run, param in ((one, mine), (other, theirs))]
            bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in pair]
            count = int((bytes_of[0] != bytes_of[1]).view(-1, pair[0].element_size()).any(-1).sum())
            if count:
                found.append(f"{part} of {name} in {count} of {pair[0].numel()} elements")
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    return "; ".join(found[:4]) + more if found else "no masters or moments do, only the parameters"


def _uncounted(stats: dict[str, Any], synchronous: dict[str, Any]) -> list[str]:
    speculated, ended = stats["buckets_speculated"], sum(stats[f"buckets_{name}"] for name in OUTCOMES)
    problems = []
    if speculated != ended:
        problems.append(f"{speculated} buckets were speculated, but {ended} {', '.join(OUTCOMES)}")
    if synchronous["buckets_speculated"]:
        problems.append(f"the synchronous run speculated {synchronous['buckets_speculated']} buckets")
    return problems


class _Run:
    """One of the two runs: a model, its optimizer and its batches. Nothing is shared with the other run."""

    def __init__(self, args: argparse.Namespace, device: Any, rank: int, ranks: int, speculation: str) -> None:
        import torch

        from superoffload.adamw import AdamW

        self.model = _model(args.seed, torch.bfloat16 if args.dtype == "bf16" else torch.float32).to(device)
        self.numel = sum(param.numel() for param in self.model.parameters())
        if ranks > 1:
            _shard(self.model)
        names = ("delivery", "bucket_numel", "threads", "state_dtype", "master_dtype", "seed")
        given = {"speculation": speculation, **{name: getattr(args, name) for name in names}}
        self.optimizer: AdamW = AdamW(
            self.model.parameters(), 1e-3, weight_decay=0.1, max_grad_norm=_NEVER_CLIPS, model=self.model, **given
        )
        self._batches = _batches(args.seed * 1000 + rank, device)
        self._poisons = rank == ranks - 1
        self._last_norm = 1.0
        self.loss = 0.0

    def step(self, trouble: Trouble) -> None:
        optimizer = self.optimizer
        clip = _NEVER_CLIPS if trouble.clip is None else trouble.clip * self._last_norm
        optimizer.max_grad_norm = _NEVER_CLIPS if trouble.late_clip else clip
        if trouble.drop:
            self._micro_batches(_NONE)
            optimizer.zero_grad()
        self._micro_batches(trouble)
        if trouble.again:
            self._backward(_NONE)
        try:
            if trouble.raises:
                raise _UserError
            optimizer.max_grad_norm = clip
            for group in optimizer.param_groups:
                group["lr"] *= trouble.lr or 1.0
            optimizer.step()
            norm = float(optimizer.grad_norm or 0.0)
            self._last_norm = norm if 0.0 < norm < _INF else self._last_norm
        except _UserError:
            pass
        optimizer.zero_grad()

    def _micro_batches(self, trouble: Trouble) -> None:
        for _ in range(MODEL["micro_batches"] - 1):
            with self.optimizer.accumulate():
                self._backward(_NONE)
        self._backward(trouble)

    def _backward(self, trouble: Trouble) -> None:
        import torch.nn.functional as F

        tokens = next(self._batches)
        poison = trouble.poison if self._poisons else None
        logits = self.model(tokens[:, :-1], poison, trouble.late_poison)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss / MODEL["micro_batches"]).backward()
        self.loss = loss.item()


def _model(seed: int, dtype: Any) -> nn.Module:
    """Returns a model that predicts the next byte: embedding, gated causal means, feed-forward layers, logits."""
    import torch
    from torch import nn

    width = MODEL["width"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            # As a product: cumsum() of floats has no deterministic kernel on a GPU.
            weights = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
            before = ((weights / weights.sum(1, keepdim=True)) @ x.float()).to(x.dtype)
            y = self.norm(x + self.mix(before))
            mixed: Tensor = x + self.down(nn.functional.gelu(self.up(y)))
            return mixed

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, width)
            self.blocks = nn.ModuleList(Block() for _ in range(MODEL["layers"]))
            self.head = nn.Linear(width, 256, bias=False)

        def forward(self, tokens: Tensor, poison: float | None, late: bool) -> Tensor:
            x = embedded = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            if poison is not None:
                # A hook on an activation: it works for sharded parameters too.
                (embedded if late else logits).register_hook(lambda grad: grad * poison)
            return logits

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Bytes().to(dtype)


def _shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def _batches(seed: int, device: Any) -> Iterator[Tensor]:
    """Yields windows of a source file of the standard library, int64 [batch, window + 1], drawn from ``seed``."""
    import torch

    with open(argparse.__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(MODEL["window"] + 1)
    while True:
        starts = torch.randint(0, len(text) - len(window), (MODEL["batch"], 1), generator=generator)
        yield text[starts + window].long().to(device)


# ---- ranks and the machine ----------------------------------------------------------------------------------------


@contextmanager
def _ranks(wanted: str | None) -> Iterator[tuple[Any, int, int]]:
    """Yields this rank's device, its number and the count of ranks; joins those that torchrun has started."""
    import torch
    import torch.distributed as dist

    kind = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ArgumentError(f"device={wanted}: expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device=cuda: torch sees no CUDA device here; leave --device out, or give cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if ranks == 1:
        yield device, 0, 1
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield device, dist.get_rank(), ranks
    finally:
        dist.destroy_process_group()


def _gathered(value: Any, ranks: int) -> Sequence[Any]:
    if ranks == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    return values


def _of_all_ranks(result: Result, ranks: int) -> Result:
    """Adds every rank's problems, and what some rank did not exercise."""
    if ranks == 1:
        return result
    every = _gathered((result.problems, result.missing), ranks)
    problems = [f"rank {rank}: {problem}" for rank, (found, _) in enumerate(every) for problem in found]
    return replace(result, problems=problems, missing=sorted({name for _, missing in every for name in missing}))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sets deterministic algorithms, so that equal steps give equal gradients."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
