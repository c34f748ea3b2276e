"""`trace=`: what a timeline shows of a step, that it changes nothing, and that without it nothing is in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from superoffload.timeline import COMPUTE, DOWN, PROCESSORS, UP, VERDICT, span

BUCKETS = 4


def make(trace: Path | None = None, **options: Any) -> tuple[list[torch.nn.Parameter], AdamW]:
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(2048)) for _ in range(BUCKETS)]
    settings = {"lr": 1e-2, "speculation": "always", "bucket_numel": 2048, "threads": 2, **options}
    return params, AdamW(params, trace=trace, **settings)


def backward(params: list[torch.nn.Parameter], scale: float = 1.0) -> None:
    torch.manual_seed(4)
    sum((p * torch.randn(2048)).sum() * scale for p in params).backward()  # type: ignore[union-attr]


def steps_of(path: Path) -> dict[int, list[dict[str, Any]]]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":
            steps.setdefault(event["args"]["step"], []).append(event)
    return steps


def in_lane(events: list[dict[str, Any]], lane: str) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] == lane]


def run_every_fate(path: Path) -> None:
    params, optimizer = make(path, max_grad_norm=1e6)
    for scale, threshold, finish in (
        (1.0, 1e6, optimizer.step),  # 1 committed
        (1.0, 1e-2, optimizer.step),  # 2 replayed: the threshold falls after backward
        (float("nan"), 1e6, optimizer.step),  # 3 skipped
        (1.0, 1e6, optimizer.zero_grad),  # 4 abandoned
    ):
        optimizer.max_grad_norm = 1e6
        with span(optimizer.timeline, "forward"):
            pass
        backward(params, scale)
        optimizer.max_grad_norm = threshold
        finish()
        optimizer.zero_grad()
    optimizer.close()


def test_every_lane_and_fate(tmp_path: Path) -> None:
    run_every_fate(tmp_path / "t.json")
    steps = steps_of(tmp_path / "t.json")
    assert sorted(steps) == [1, 2, 3, 4]
    fates = {step: {e["args"]["fate"] for e in events if "fate" in e["args"]} for step, events in steps.items()}
    assert fates == {1: {"committed"}, 2: {"replayed"}, 3: {"skipped"}, 4: {"abandoned"}}
    for step, verdict in ((1, "no clip"), (2, "clip"), (3, "found inf: skip")):
        assert [event["name"] for event in in_lane(steps[step], VERDICT)] == [verdict]
    assert in_lane(steps[4], VERDICT) == []
    verbs = {step: [e["name"].split()[2].rstrip(":") for e in in_lane(steps[step], PROCESSORS)] for step in steps}
    assert verbs[1] == ["speculate"] * BUCKETS
    assert sorted(verbs[2]) == ["replay"] * BUCKETS + ["speculate"] * BUCKETS
    assert sorted(verbs[4]) == ["speculate"] * BUCKETS + ["undo"] * BUCKETS
    for step in (1, 2):
        assert len(in_lane(steps[step], DOWN)) == len(in_lane(steps[step], UP)) == BUCKETS
        assert [event["name"] for event in in_lane(steps[step], COMPUTE)] == ["forward", "backward", "step()"]
    assert in_lane(steps[3], UP) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"speculation": "never"}, "speculation='never' chose to wait"),
        ({"max_grad_norm": 1e-3}, "the gradients so far prove that the step will be clipped or skipped"),
        ({"lr": 1e-3}, "it was stepped and undone"),
    ],
)
def test_why_a_bucket_was_stepped_after_the_verdict(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    params, optimizer = make(tmp_path / "t.json", **options)
    backward(params)
    if "lr" in options:
        optimizer.param_groups[0]["lr"] = 1e-4
    optimizer.step()
    optimizer.close()
    events = in_lane(steps_of(tmp_path / "t.json")[1], PROCESSORS)
    assert why in {event["args"].get("waited") for event in events if event["name"].split()[2] == "step:"}
    assert not any("waited" in event["args"] for event in events if event["name"].split()[2] == "speculate:")


def test_trace_of_a_killed_program_can_be_read(tmp_path: Path) -> None:
    """Here of one step with a second backward, which undoes the first."""
    params, optimizer = make(tmp_path / "t.json")
    backward(params)
    backward(params)
    optimizer.step()
    events = json.loads((tmp_path / "t.json").read_text() + "]")  # not closed yet
    optimizer.close()
    assert json.loads((tmp_path / "t.json").read_text()) == events
    (step,) = steps_of(tmp_path / "t.json").values()
    verbs = [event["name"].split()[2].rstrip(":") for event in in_lane(step, PROCESSORS)]
    assert verbs.count("undo") == BUCKETS and verbs.count("speculate") == 2 * BUCKETS


def test_a_full_disk_ends_the_timeline_and_no_step() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs Linux: writes to /dev/full")
    digests = []
    for trace in (None, full):
        params, optimizer = make(trace)
        for step in range(3):
            optimizer.zero_grad()
            backward(params)
            if trace is not None and step == 0:
                with pytest.warns(RuntimeWarning, match=r"trace=/dev/full: .*No space left on device.*goes on"):
                    optimizer.step()
            else:
                optimizer.step()
        optimizer.close()
        digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


def test_a_path_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"trace=/no/such/folder/t\.json: the file cannot be written"):
        make(Path("/no/such/folder/t.json"))
