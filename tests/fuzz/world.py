"""What a program acts on: a net, an optimizer, what was saved; and what its user has seen of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.checkpoints.saving import Saving
from tests.fuzz.model import Net
from tests.fuzz.oracle import Oracle, ParamState
from tests.fuzz.program import Op, Program


@dataclass
class Seen:
    """What one run has shown."""

    trace: list[tuple[int, str, Any]] = field(default_factory=list)  # number of the operation, what, value
    stepped: list[bool] = field(default_factory=list)  # of the steps that signals met, whether they happened
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Saved:
    """What a slot has. ``state``: of the run that waits, to compare after loading."""

    what: Any  # a folder, or weights and state_dict
    state: dict[Tensor, ParamState | None] | None
    saving: Saving | None = None


class World:
    """``follows``: what the run that speculates has seen; None: this is that run.

    The other one waits for every verdict and delivers eagerly, in one large bucket per group.
    """

    def __init__(self, program: Program, folder: Path, follows: Seen | None = None) -> None:
        settings = program.settings
        self.settings = settings
        self.folder = folder / ("speculates" if follows is None else "waits")
        self.seen = Seen()
        self.at = 0  # the operation that runs
        self.speculates = follows is None
        self.stepped = list(follows.stepped) if follows is not None else []
        self.net = Net(settings)
        self.later = sorted({group for group in settings.groups if group >= 2})
        used = sorted({group for group in settings.groups if group < 2})
        self.optimizer = AdamW(
            [{"params": self.members(group), "weight_decay": 0.1 * group} for group in used],
            lr=settings.lr,
            max_grad_norm=settings.max_grad_norm,
            state_dtype=settings.state_dtype,
            master_dtype=settings.master_dtype,
            accumulate_dtype=settings.accumulate_dtype if hasattr(Tensor, "grad_dtype") else None,
            module=self.net,
            **(self._speculating() if self.speculates else {"speculation": "never", "threads": 1}),
        )
        looks = {"compares": settings.state_dtype == "fp32", "split": settings.master_dtype == "split"}
        self.oracle = None if self.speculates else Oracle(self.optimizer, **looks)
        self.scaler: torch.amp.GradScaler | None = None
        if settings.loss_scale is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=settings.loss_scale, growth_interval=2)
        self.slots: dict[int, Saved] = {}
        self.kept: Tensor | None = None  # a loss whose graph was retained
        self.kept_state: list[tuple[Tensor, Tensor]] = []  # parameters, and moments of theirs
        self.taken_out: list[Tensor] = []  # of the groups
        self.restructured = False  # the state, since the last step: the optimizer follows at a moment not promised
        self.written = False  # parameters, since the last step: their masters follow at a moment that is not promised

    def _speculating(self) -> dict[str, Any]:
        settings = self.settings
        mode = settings.schedule if settings.schedule != "mixed" else "always"  # forced: see there
        options: dict[str, Any] = {"speculation": mode, "delivery": settings.delivery}
        return {**options, "threads": settings.threads, "bucket_numel": settings.bucket_numel}

    # ---- what was seen ------------------------------------------------------------------------------------------

    def note(self, what: str, value: Any = None) -> None:
        """The user sees this: the other run must show the same."""
        self.seen.trace.append((self.at, what, value))

    def count(self, what: str) -> None:
        self.seen.counts[what] += 1

    def note_published(self) -> None:
        """Only step() changes a parameter; with delivery on demand it cannot be looked at."""
        if self.settings.delivery == "eager":
            words = {2: torch.int16, 4: torch.int32}
            sums = [int(p.detach().view(words[p.element_size()]).sum()) for p in self.net.parameters()]
            self.note("published", sums)

    def note_verdict(self) -> None:
        verdict = self.optimizer.last_verdict
        self.note("verdict", None if verdict is None else [float(value).hex() for value in verdict])

    def loss(self, op: Op, only: list[int] | None = None) -> Tensor:
        loss: Tensor = self.net(op, only)
        self.note("loss", float(loss.item()).hex())
        return loss if self.scaler is None else self.scaler.scale(loss)

    # ---- parameters ---------------------------------------------------------------------------------------------

    def members(self, group: int) -> list[Tensor]:
        layers = zip(self.net.layers, self.settings.groups, strict=True)
        return [param for layer, its in layers if its == group for param in layer.parameters()]

    def params(self, op: Op) -> list[nn.Parameter]:
        return list(self.net.layer(op["layer"]).parameters())

    def grouped(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def shows_moments(self) -> bool:
        """Whether its state has moments themselves, not copies."""
        return self.settings.state_dtype != "8bit"

    # ---- saves in the background --------------------------------------------------------------------------------

    def is_saving(self) -> bool:
        return any(saved.saving is not None and not saved.saving.done for saved in self.slots.values())

    def wait_for_savings(self) -> None:
        for saved in self.slots.values():
            if saved.saving is not None:
                saved.saving.wait(60.0)
                saved.saving = None
