"""Trains with torchtitan on processors, one run after another in the same ranks, and writes what each rank saw.

    torchrun --nproc-per-node 2 -m tests.integrations.titan_program RESULTS CASES

CASES: a JSON file with a list of runs: {"name": ..., "arguments": [...]} for torchtitan. RESULTS: a folder for a JSON
file per rank.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from examples.torchtitan.on_cpus import prepare
from superoffload.metrics import Monitor
from tests.support.checkout import ROOT

EXAMPLE = ROOT / "examples" / "torchtitan"


def main(results: Path, cases: Path) -> None:
    sys.path.insert(0, str(EXAMPLE))  # where text_models is
    prepare()
    seen = {case["name"]: _run(case["arguments"]) for case in json.loads(cases.read_text())}
    (results / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def _run(arguments: list[str]) -> dict[str, Any]:
    from torchtitan.config import ConfigManager

    try:
        trainer = ConfigManager().parse_args(["--module", "text_models", *arguments]).build()
    except ValueError as error:
        return {"error": str(error)}
    logged = _record(trainer)
    try:
        with mock.patch.object(Monitor, "step", autospec=True, side_effect=Monitor.step) as watched:
            trainer.train()
        # before the digests, which it must not change
        refusal = _load_in_part(trainer.optimizers) if hasattr(trainer.optimizers, "adamw") else ""
        return {**logged, **_state(trainer), "refusal": refusal, "steps watched": watched.call_count}
    except ValueError as error:
        return {"error": str(error)}
    finally:
        for optimizer in trainer.optimizers:
            getattr(optimizer, "close", lambda: None)()
        trainer.close()


def _record(trainer: Any) -> dict[str, list[Any]]:
    """Returns lists that fill with what torchtitan logs."""
    logged: dict[str, list[Any]] = {"losses": [], "norms": [], "metrics": []}
    log = trainer.metrics_processor.logger.log

    def also(metrics: dict[str, Any], step: int) -> None:
        logged["losses"].append(metrics["loss_metrics/global_avg_loss"])
        logged["norms"].append(metrics["grad_norm"])
        logged["metrics"].append({name: value for name, value in metrics.items() if name.startswith("superoffload/")})
        log(metrics, step)

    trainer.metrics_processor.logger.log = also
    return logged


def _state(trainer: Any) -> dict[str, Any]:
    """Returns digests of all whole tensors by name, and sums of squares, which nearly equal runs share."""
    digests = {
        name: _digest(value)
        for name, value in sorted(trainer.optimizers.state_dict().items())
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    params = {name: param for part in trainer.model_parts for name, param in part.named_parameters()}
    whole = {name: _whole(param.detach()) for name, param in sorted(params.items())}
    adamw = getattr(trainer.optimizers, "adamw", None)
    return {
        "digests": {**digests, **{f"param.{name}": _digest(value) for name, value in whole.items()}},
        "squares": {name: float(value.double().square().sum()) for name, value in whole.items()},
        "stats": {} if adamw is None else adamw.stats(),
    }


def _load_in_part(optimizers: Any) -> str:
    """Returns how the container refuses a state without one parameter's entries."""
    state = optimizers.state_dict()
    missing = next(name for name in state if name.endswith(".step"))
    try:
        optimizers.load_state_dict({name: value for name, value in state.items() if name != missing})
    except ValueError as error:
        return str(error)
    return "loaded"


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(_whole(value).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
