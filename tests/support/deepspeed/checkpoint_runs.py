"""Runs that are saved on their way, and runs that go on from there."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

from tests.support.deepspeed.scenarios import CLIP_SOME, WAYS, Scenario
from tests.support.deepspeed.training import end, masters

SCENARIOS = {
    "bf16": Scenario({"clip": CLIP_SOME, "zero": {"sub_group_size": 2000}}),
    "groups": Scenario({"clip": CLIP_SOME}, groups=True),
    "fp16": Scenario({"precision": "fp16", "clip": CLIP_SOME}),
}


def make_engine(scenario: str, way: str, form: dict[str, Any]) -> Any:
    offload, options = WAYS[way]
    return SCENARIOS[scenario].engine(offload, None if options is None else {**options, **form})


def train_and_save(
    scenario: str, way: str, folder: str, saved: int, steps: int, form: dict[str, Any] | None = None
) -> Any:
    """Digests (ours) or masters (stock) at the end of a run that was saved on its way. ``form``: options of state."""
    engine = make_engine(scenario, way, form or {})
    SCENARIOS[scenario].train(engine, range(saved))
    engine.save_checkpoint(folder, tag="saved")
    record = SCENARIOS[scenario].train(engine, range(saved, steps))
    return _outcome(engine, way, record)


def load_and_train(
    scenario: str, way: str, folder: str, saved: int, steps: int, form: dict[str, Any] | None = None, **options: Any
) -> Any:
    """The same end, reached from the checkpoint by a new engine that has already trained on something else."""
    engine = make_engine(scenario, way, form or {})
    SCENARIOS[scenario].train(engine, range(50, 53))
    if way != "stock":  # a window in flight, which stock would add to the next one
        engine.backward(SCENARIOS[scenario].loss_of(engine, 60, 0))
    path, _ = engine.load_checkpoint(folder, tag="saved", **options)
    assert path is not None
    record = SCENARIOS[scenario].train(engine, range(saved, steps))
    return _outcome(engine, way, record)


def _outcome(engine: Any, way: str, record: dict[str, Any]) -> Any:
    outcome = (
        {name: value.cpu() for name, value in masters(engine).items()},
        None if way == "stock" else (engine.optimizer.state_digests(), saved_state(engine)),
        record,
    )
    end(engine)
    return outcome


def saved_state(engine: Any) -> str:
    """What a checkpoint would hold of masters and moments now: not the state of the checkpoint that was loaded."""
    state = engine.optimizer.state_dict()
    entries = state["optimizer_state_dict"]["state"].values()
    moments = [entry[name] for entry in entries for name in ("exp_avg", "exp_avg_sq")]
    parts = [tensor.detach().float().numpy().tobytes() for tensor in [*state["fp32_flat_groups"], *moments]]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def make_universal(folder: Path) -> None:
    """Converts the checkpoint ``saved`` to ``universal``, with DeepSpeed's own tool."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = argparse.Namespace(
        input_folder=str(folder / "saved"),
        output_folder=str(folder / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    before = sys.argv
    try:
        ds_to_universal.main(arguments)
    finally:
        sys.argv = before
