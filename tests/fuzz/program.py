"""A program: settings and operations as plain data, drawn from a seed. It says what happens, ``machine`` makes it so.

Every operation makes sense wherever it stands (what it has nothing to act on, it leaves alone), so that any part of a
program is a program too: that is what ``campaign.shortened`` cuts them down by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from tests.support.callers_modes import OF_WHOLE_PROGRAMS

Op = dict[str, Any]  # {"do": its name, ...}


@dataclass(frozen=True)
class Settings:
    """What a program runs on. A layer has parameters of these sizes; groups beyond the first two are added later."""

    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # of each layer
    groups: tuple[int, ...]  # of each layer
    frozen: tuple[int, ...] = ()  # layers that do not train at first
    idle_from: int | None = None  # layers from this one on get no gradient now and then, as experts without a token
    coupling: float = 0.0  # how much gradients depend on parameters
    max_grad_norm: float | None = None
    lr: float = 1e-2
    loss_scale: float | None = None  # of a GradScaler; None: without one
    # Of the run that speculates; the other one waits:
    schedule: str = "always"  # or "adaptive", "mixed": speculating, one pass and two phases at random
    schedule_seed: int = 0
    delivery: str = "eager"
    bucket_numel: int = 1024
    threads: int = 1
    journal_width: int | None = None
    journal_room: float | None = None  # bytes per parameter for escapes; None: as built
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    accumulate_dtype: str | None = None
    mode: str | None = None  # around all operations, the making of the optimizer included; None: none


@dataclass(frozen=True)
class Program:
    seed: int
    settings: Settings
    ops: tuple[Op, ...]

    def with_ops(self, ops: Sequence[Op]) -> Program:
        return replace(self, ops=tuple(ops))

    def to_json(self) -> str:
        """One operation per line, so that people can read and edit it."""
        head = json.dumps({"seed": self.seed, "settings": asdict(self.settings)})[:-1]
        lines = ",\n  ".join(json.dumps(op) for op in self.ops)
        return f'{head}, "ops": [\n  {lines}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Program:
        content = json.loads(text)
        tuples = {k: _tuples(v) for k, v in content["settings"].items()}
        return Program(content["seed"], Settings(**tuples), tuple(content["ops"]))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


# ---- drawing --------------------------------------------------------------------------------------------------------

_SIZES = (5, 64, 130, 300, 700, 1024, 1500)
_EXPERTS = ((300,),) * 16
_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.99))


def draw_settings(random: Random) -> Settings:
    layers = random.randint(3, 6)
    one_dtype = random.choice(["fp32", "fp32", "bf16", "fp16"])
    mixed = random.random() < 0.25
    groups = [random.choice([0, 0, 1]) for _ in range(layers)]
    for later in range(random.choice([0, 0, 1, 2])):
        groups[-1 - later] = 2 + later
    groups[0], groups[1] = 0, random.choice([0, 1])
    delivery = random.choice(["eager", "eager", "on_demand"])
    drawn = Settings(
        sizes=tuple(tuple(random.choice(_SIZES) for _ in range(random.choice([1, 1, 2]))) for _ in range(layers)),
        dtypes=tuple(random.choice(["fp32", "bf16", "fp16"]) if mixed else one_dtype for _ in range(layers)),
        groups=tuple(groups),
        frozen=(random.randrange(layers),) if random.random() < 0.2 else (),
        coupling=random.choice([0.0, 0.25]),
        max_grad_norm=random.choice([None, None, 1e6, 60.0, 1.0]),
        loss_scale=random.choice([None, None, None, 1024.0]),
        lr=random.choice([1e-2, 1e-3, 0.1]),
        schedule=random.choice(["always", "adaptive", "mixed", "mixed", "mixed"]),
        schedule_seed=random.randrange(1000),
        delivery=delivery,
        bucket_numel=random.choice([1024, 1024, 2048, 1 << 20]),
        threads=random.randint(1, 3),
        journal_width=random.choice([None, None, None, 1, 2]),
        journal_room=random.choice([None, None, None, None, 0.02, 0.3, 12.0]),
        state_dtype="bf16" if random.random() < 0.1 else "fp32",
    )
    if drawn.schedule_seed % 3 == 0:  # not drawn, so that every seed keeps its program
        drawn = replace(drawn, accumulate_dtype="fp32")
    at_first = [dtype for dtype, group in zip(drawn.dtypes, drawn.groups, strict=True) if group < 2]
    if drawn.schedule_seed % 4 and "bf16" in at_first:  # likewise
        drawn = replace(drawn, master_dtype="split")
    if drawn.schedule_seed % 5 == 1:  # likewise
        few = replace(drawn, bucket_numel=1024, idle_from=layers)
        drawn = replace(few, sizes=few.sizes + _EXPERTS, dtypes=few.dtypes + (one_dtype,) * len(_EXPERTS))
        drawn = replace(drawn, groups=few.groups + (0,) * len(_EXPERTS))
    return drawn


def draw(seed: int) -> Program:
    """The program of this seed."""
    random = Random(seed)
    settings = draw_settings(random)
    if seed % 7 == 2:  # not drawn, so that every seed keeps its program
        settings = replace(settings, mode=OF_WHOLE_PROGRAMS[seed // 7 % len(OF_WHOLE_PROGRAMS)])
    return Program(seed, settings, tuple(_with_more(_Drawing(random, settings).all(), seed, settings)))


_STATE_EDITS = ("multiply", "keep", "kept", "step", "delete", "keep", "kept", "assign", "empty", "clear", "replace")
_REGROUPINGS = ("move", "take out", "reverse", "put back", "order", "move")


def _with_more(ops: Sequence[Op], seed: int, settings: Settings) -> list[Op]:
    """Behind every fifth operation or so the optimizer sleeps, in every third program state is edited; not drawn, so
    that every seed keeps its program."""
    found: list[Op] = []
    for number, op in enumerate(ops):
        found.append(op)
        sleeps = settings.schedule_seed + number
        if sleeps % 5 == 0:
            found.append({"do": "sleep"})
        if seed % 3 == 0 and (seed // 3 + number) % 4 == 0:
            how = _STATE_EDITS[(seed // 12 + number // 4) % len(_STATE_EDITS)]
            found.append({"do": "edit_state", "layer": number % len(settings.sizes), "how": how})
        if seed % 4 == 1 and (seed // 4 + number) % 5 == 0:
            how = _REGROUPINGS[(seed // 20 + number // 5) % len(_REGROUPINGS)]
            found.append({"do": "regroup", "layer": number % len(settings.sizes), "how": how})
        if seed % 5 == 3 and (seed // 5 + number) % 6 == 0:
            found.append({"do": "tie"})
    return found


class _Drawing:
    """Steps as training has them, with something out of the ordinary before, between and after them."""

    def __init__(self, random: Random, settings: Settings) -> None:
        self.random, self.settings = random, settings
        self.layers = len(settings.sizes)
        self.ops: list[Op] = []
        self.anywhere: list[tuple[int, Callable[[], Op]]] = [
            (4, self._hyper),
            (3, self._max_grad_norm),
            (3, self._edit),
            (2, self._freeze),
            (3, self._write),
            (1, lambda: {**self._write(), "do": "write_data"}),
            (1, lambda: {"do": "load_weights"}),
            (3, self._save),
            (2, lambda: {"do": "load", "slot": random.choice([0, 0, 1])}),
            (1, lambda: {"do": "wait_saved"}),
            (3, lambda: {"do": "look", "at": random.choice(["digests", "state", "synchronize", "state_dict"])}),
            (2, lambda: {"do": "forward", "seed": random.randrange(1000)}),
            (1, lambda: {"do": "add_group", "lr": random.choice([1e-3, 0.1])}),
            (1, self._zero_grad),
            (3, lambda: {"do": "backward_again"}),
            (1, lambda: {"do": "refresh_masters"}),
            (2, lambda: {**self._backward(), "do": "threads"}),
            (2, self._interrupted_backward),
        ]

    def all(self) -> list[Op]:
        random = self.random
        if random.random() < 0.8:  # so that what follows meets moments and an observed order
            self.ops += [self._plain(), {"do": "step"}] * random.randint(1, 2)
        for _ in range(random.randint(2, 6)):
            self._step()
        return self.ops

    def _step(self) -> None:
        random = self.random
        self._anything(0.35)
        if random.random() < 0.85:
            self.ops.append(self._zero_grad())
        for last in [False] * random.choice([0, 0, 0, 1, 2]) + [True]:
            one = self._backward() if random.random() < 0.5 else self._plain()
            if not last and random.random() < 0.6:
                one["accumulate"] = True
            self.ops.append(one)
            self._anything(0.25)
        if random.random() < 0.08:
            self.ops.append(self._hyper())
        if random.random() < 0.9:
            self.ops.append(self._optimizer_step())
        if random.random() < 0.15:  # right behind a step: what is not delivered or settled yet is met there
            self.ops.append(random.choice([self._save, self._write, self._zero_grad])())

    def _anything(self, chance: float) -> None:
        while self.random.random() < chance:
            weights = [weight for weight, _ in self.anywhere]
            (_, make) = self.random.choices(self.anywhere, weights)[0]
            self.ops.append(make())

    # ---- one operation ------------------------------------------------------------------------------------------

    def _layer(self) -> int:
        return self.random.randrange(self.layers)

    def _plain(self) -> Op:
        return {"do": "backward", "seed": self.random.randrange(1000)}

    def _backward(self) -> Op:
        random = self.random
        op: Op = {**self._plain(), "scale": random.choice([1.0, 1.0, 1e-3, 50.0, 1e4, 1e-41, 0.0])}
        if random.random() < 0.3:
            op["without"] = [self._layer()]
        if random.random() < 0.2:
            op["poison"] = [self._layer(), random.choice(["nan", "inf", "-inf", "1e25", "-0.0"])]
        if random.random() < 0.15:
            op["twice"] = True
        if random.random() < 0.15:
            op["keep"] = True
        if random.random() < 0.15:
            op["raises"] = self._layer()
            op["error"] = random.choice(["error", "error", "interrupt"])
        return op

    def _optimizer_step(self) -> Op:
        random = self.random
        kind = random.choices(["plain", "closure", "unscaled", "interrupted"], [16, 2, 2, 3])[0]
        if kind == "interrupted":
            return {"do": "interrupted_step", **self._signals()}
        if kind == "closure":
            return {"do": "step", "closure": self._plain()}
        return {"do": "step", "unscale": True} if kind == "unscaled" else {"do": "step"}

    def _interrupted_backward(self) -> Op:
        return {**self._plain(), "do": "interrupted_backward", **self._signals()}

    def _signals(self) -> Op:
        """At that line of ours that is run, the count going on from each to the next."""
        random = self.random
        often = random.choice([1, 2, 3])
        lines = [int(10 ** random.uniform(0, 3.2))] + [int(10 ** random.uniform(0, 1.5)) for _ in range(often - 1)]
        op: Op = {"signal": random.choice(["SIGINT", "SIGINT", "SIGTERM"]), "lines": lines}
        if random.random() < 0.3:  # where signals are held back: few lines, and all of them matter
            op["where"] = "host/signals.py"
            op["lines"] = [random.randint(1, 60) for _ in lines]
        return op

    def _zero_grad(self) -> Op:
        return {"do": "zero_grad", "set_to_none": self.random.random() < 0.8}

    def _hyper(self) -> Op:
        random = self.random
        drawn = {
            "lr": random.choice([0.0, 1e-4, 1e-2, 0.3]),
            "betas": list(random.choice(_BETAS)),
            "eps": random.choice([1e-8, 1e-3]),
            "weight_decay": random.choice([0.0, 0.1, 1.0]),
            "maximize": random.random() < 0.7,
        }
        name, value = random.choice(list(drawn.items()))
        return {"do": "hyper", "group": random.randint(0, 3), "name": name, "value": value}

    def _max_grad_norm(self) -> Op:
        return {"do": "max_grad_norm", "value": self.random.choice([None, 1e6, 60.0, 1.0, 1e-3])}

    def _edit(self) -> Op:
        how = self.random.choice(["multiply", "add", "none", "replace", "zero", "nan", "clip", "clip_value"])
        return {"do": "edit", "layer": self._layer(), "how": how}

    def _freeze(self) -> Op:
        return {"do": "freeze", "layer": self._layer(), "frozen": self.random.random() < 0.5}

    def _write(self) -> Op:
        how = self.random.choice(["multiply", "copy", "clamp", "one", "negative_zero"])
        return {"do": "write", "layer": self._layer(), "how": how, "seed": self.random.randrange(1000)}

    def _save(self) -> Op:
        how = self.random.choice(["state_dict", "checkpoint", "background", "background"])
        memory = self.random.choice([0, 4096, 1 << 30])
        return {"do": "save", "slot": self.random.choice([0, 0, 1]), "how": how, "memory": memory}
