"""Ways to train the recorded model: with stock ZeRO-3 CPU offload, with ours speculating, and with ours waiting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.deepspeed import training
from tests.support.deepspeed.training import OURS, STOCK, Recorded, end, masters, recorded_gradient

CLIP_SOME = 0.75  # of the norms of recorded_gradient, about half are larger


@dataclass(frozen=True)
class Scenario:
    config: dict[str, Any] = field(default_factory=dict)
    micros: int = 1
    one_step_call: bool = False
    frozen: Sequence[int] = ()
    groups: bool = False
    poison: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # step: rank, dot, value
    before_step: Callable[[Any, int], None] | None = None

    def model(self) -> Recorded:
        torch.manual_seed(1)
        model = Recorded()
        for index in self.frozen:
            model.dots[index].weight.requires_grad_(False)
        return model

    def engine(self, offload: dict[str, Any], options: dict[str, Any] | None) -> Any:
        model = self.model()
        configuration = training.config(offload, options=options, **self.config)
        if not self.groups:
            return training.make_engine(configuration, model)
        del configuration["optimizer"]
        params = list(model.parameters())
        groups = [{"params": params[:3], "lr": 1e-3}, {"params": params[3:], "weight_decay": 0.0, "betas": (0.8, 0.95)}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
        return training.make_engine(configuration, model, optimizer=optimizer)

    def loss_of(self, engine: Any, step: int, micro: int) -> Tensor:
        rank, dot, value = self.poison.get(step, (-1, 0, 0.0))
        loss: Tensor = engine(step, micro, self.frozen, {dot: value} if rank == dist.get_rank() else None)
        return loss

    def train(self, engine: Any, steps: range) -> dict[str, Any]:
        more: dict[str, Any] = {"before_step": self.before_step, "one_step_call": self.one_step_call}
        return training.run_steps(engine, steps, micros=self.micros, loss_of=self.loss_of, **more)


def warm_up(engine: Any, step: int) -> None:
    """Changes what a scheduler or a user changes, between backward and the step."""
    groups = engine.optimizer.param_groups
    groups[0]["lr"] = 1e-3 * (step + 1) / 4
    if step == 4:
        groups[1]["betas"] = (0.7, 0.9)
        groups[1]["weight_decay"] = 0.05


INF = {3: (1, 3, float("inf")), 7: (0, 0, float("nan"))}
OFFLOADED = {"offload_param": {"device": "cpu", "pin_memory": False}}
HUGE = {3: (1, 3, 1e30), 7: (0, 0, float("nan"))}

SCENARIOS: dict[str, Scenario] = {
    "no clipping": Scenario(),
    "clip sometimes": Scenario({"clip": CLIP_SOME}),
    "clip always": Scenario({"clip": 1e-3}),
    "fp16, static scale": Scenario({"precision": "fp16 128", "clip": CLIP_SOME}),
    "fp16, dynamic scale": Scenario(
        {
            "precision": "fp16",
            "clip": CLIP_SOME,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 4}},
        },
        poison=HUGE,
    ),
    "bf16, not finite": Scenario({"clip": CLIP_SOME}, poison=INF),
    "accumulation": Scenario({"clip": CLIP_SOME, "accumulation": 2}, micros=2),
    "accumulation in fp32": Scenario(
        {"clip": CLIP_SOME, "accumulation": 2, "data_types": {"grad_accum_dtype": "fp32"}}, micros=2
    ),
    "reduced in fp32": Scenario(
        {
            "clip": CLIP_SOME,
            "accumulation": 2,
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        },
        micros=2,
    ),
    "unmanaged accumulation": Scenario(
        {"clip": CLIP_SOME, "accumulation": 2, "managed_gradient_accumulation": False}, micros=2, one_step_call=True
    ),
    "two backwards": Scenario({"clip": CLIP_SOME}, micros=2, one_step_call=True),
    "groups that change": Scenario({"clip": CLIP_SOME}, groups=True, before_step=warm_up),
    "small sub-groups": Scenario({"clip": CLIP_SOME, "zero": {"sub_group_size": 1000}}),
    "persistent parameters": Scenario({"clip": CLIP_SOME, "zero": {"stage3_param_persistence_threshold": 3000}}),
    "parameters offloaded": Scenario({"clip": CLIP_SOME, "zero": OFFLOADED}),
    "parameters offloaded, not finite": Scenario(
        {"clip": CLIP_SOME, "zero": OFFLOADED}, groups=True, poison={3: (0, 0, float("inf")), 7: (0, 0, float("nan"))}
    ),  # the other group's bucket is speculated before that gradient comes
    "L2": Scenario({"clip": CLIP_SOME, "optimizer": {"adam_w_mode": False}, "kind": "Adam"}),
    "frozen parameters": Scenario({"clip": CLIP_SOME}, frozen=(2, 5)),
    "no reduce-scatter": Scenario({"clip": CLIP_SOME, "zero": {"reduce_scatter": False}}),
}

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"master_dtype": "split"},
    "bf16": {"state_dtype": "bf16"},
    "bf16+split": {"state_dtype": "bf16", "master_dtype": "split"},
    "8bit": {"state_dtype": "8bit"},
    "8bit+split": {"state_dtype": "8bit", "master_dtype": "split"},
}  # of state that takes fewer bytes

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "stock": (STOCK, None),
    "match": (OURS, {"speculation": "always", "match_stock": True}),
    "match, waiting": (OURS, {"speculation": "never", "match_stock": True}),
    "ours": (OURS, {"speculation": "always"}),
    "ours, waiting": (OURS, {"speculation": "never"}),
    "ours, later": (OURS, {"speculation": "adaptive", "delivery": "on_demand"}),
    "super_offload": (
        {"device": "cpu", "super_offload": True},
        {"match_stock": True, "delivery": "on_demand", "speculation": "always"},
    ),
}


def compare(name: str, steps: int, ways: Sequence[str] = tuple(WAYS)) -> dict[str, Any]:
    """Trains in every way; returns records, digests, statistics, and how far masters are from stock's."""
    scenario = SCENARIOS[name]
    result: dict[str, Any] = {}
    reference: dict[str, Tensor] | None = None
    for way in ways:
        engine = scenario.engine(*WAYS[way])
        found: dict[str, Any] = {"record": scenario.train(engine, range(steps))}
        if way == "stock":
            reference = masters(engine)
        else:
            found["stats"] = engine.optimizer.stats()
            found["digests"] = engine.optimizer.state_digests()
            if reference is not None:
                found["away"] = distance(reference, masters(engine))
        end(engine)
        result[way] = found
    return result


def distance(reference: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the weight or 0.01, whichever is larger; NaN if one is NaN."""
    away = [(others[name] - value).abs() / value.abs().clamp(min=0.01) for name, value in reference.items()]
    return float(torch.stack([each.max() for each in away]).max())


# ---- torch.optim.AdamW on the recorded gradients of two ranks, some of them absent -----------------------------------

UNUSED = 4  # the dot that some steps or micro-batches leave out


def reference(
    windows: list[list[dict[int, Tensor]]],
    accumulation: int,
    clip: float,
    skip: Collection[int] = (),
    eps: float = 1e-8,
) -> dict[str, Tensor]:
    """torch.optim.AdamW on all gradients at once, averaged over ranks; an unused parameter has a gradient of zeros."""
    torch.manual_seed(1)
    model = Recorded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=eps)
    for step, micros in enumerate(windows):
        if step in skip:
            continue
        for index, param in enumerate(model.parameters()):
            param.grad = torch.zeros_like(param)
            for gradients in micros:
                if index in gradients:
                    param.grad += gradients[index] / accumulation
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def gradients_of(step: int, micro: int, skip: tuple[int, ...] = ()) -> dict[int, Tensor]:
    """The mean over two ranks, fp32 as the config of these tests accumulates."""
    return {
        index: (recorded_gradient(step, micro, 0, index, shape) + recorded_gradient(step, micro, 1, index, shape)) / 2
        for index, shape in enumerate(Recorded.SHAPES)
        if index not in skip
    }
