"""`superoffload verify`: passes on the real optimizer, and catches optimizers that are wrong in known ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload.adamw import AdamW
from superoffload.tools import verify
from superoffload.tools.cli import main
from tests.support.over_stand_in import check_links, over_stand_in


def run(*options: str) -> int:
    return main(["verify", "--quiet", "--threads", "2", "--device", "cpu", *options])


def test_every_step_is_compared_and_every_outcome_occurs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    assert run("--json", str(tmp_path / "result.json")) == 0
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["passed"] and not result["problems"] and not result["not_exercised"]
    assert result["steps"] == 24 and result["digests_compared"] == 24 * 4 and result["skipped_steps"] == 4
    buckets = result["buckets"]
    assert all(buckets[name] > 0 for name in verify.OUTCOMES)
    assert buckets["speculated"] == sum(buckets[name] for name in verify.OUTCOMES)
    assert "verified: all 96 digests are equal" in capsys.readouterr().out
    met = {name for trouble in verify.TROUBLES.values() for name, value in vars(trouble).items() if value}
    assert met == set(vars(verify.Trouble())), "every kind of trouble is met"


@pytest.mark.parametrize(
    "options",
    [
        ("--master-dtype", "split", "--state-dtype", "8bit"),
        ("--dtype", "fp32", "--delivery", "on_demand", "--state-dtype", "bf16", "--seed", "3"),
    ],
)
def test_other_settings_are_verified(options: tuple[str, ...]) -> None:
    assert run(*options) == 0


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_the_cuda_link_over_the_stand_in_is_verified(
    delivery: str, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with over_stand_in(fake) as links:
        assert run("--delivery", delivery) == 0, capsys.readouterr().out
    check_links(links)


def test_ranks_of_torchrun_verify_their_shards(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--nproc-per-node", "2", "-m", "superoffload", "verify", "--device", "cpu", "--quiet"]
    command += ["--json", str(tmp_path / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("verified: all 96 digests on each of 2 ranks are equal") == 1
    assert json.loads((tmp_path / "result.json").read_text())["ranks"] == 2


def replace_optimizer(monkeypatch: pytest.MonkeyPatch, kind: type[AdamW]) -> None:
    monkeypatch.setattr("superoffload.adamw.AdamW", kind)


def test_one_wrong_bit_is_caught_and_located(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one element of one moment, in the speculative run only."""

    class OffByOneBit(AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.stats()["buckets_speculated"] and self.stats()["steps"] == 3:
                parameter = self.param_groups[0]["params"][0]
                self.state[parameter]["exp_avg"].view(torch.int32).view(-1)[7] ^= 1

    replace_optimizer(monkeypatch, OffByOneBit)
    assert run("--json", str(tmp_path / "result.json")) == 1
    printed = capsys.readouterr().out
    assert "equal gradients went in, but exp_avg came out different" in printed
    assert "exp_avg of embedding.weight in 1 of 16384 elements" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["passed"] and result["digests_compared"] == 3 * 4, "it stops at the first difference"


def test_backward_that_does_not_repeat_is_not_blamed_on_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, calls = torch.nn.functional.cross_entropy, [0]

    def unrepeatable(*args: Any, **settings: Any) -> torch.Tensor:
        calls[0] += 1
        return loss(*args, **settings) * (1.0 + 0.01 * calls[0])

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", unrepeatable)
    assert run() == 1
    printed = capsys.readouterr().out
    assert "step 1 (): the losses differ" in printed and "not repeatable" in printed and "came out" not in printed


class MovesOnSkip(AdamW):
    """Wrong in the same way in both runs, so that all digests agree."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.last_verdict is not None and self.last_verdict.found_inf:
            self.state[self.param_groups[0]["params"][0]]["exp_avg_sq"].add_(1.0)


class LosesOne(AdamW):
    def stats(self) -> Any:
        stats = dict(super().stats())
        stats["buckets_committed"] -= stats["buckets_committed"] > 0
        return stats


def fixed(speculation: str) -> type[AdamW]:
    class Fixed(AdamW):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "speculation": speculation})

    return Fixed


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MovesOnSkip, "step 4 (poison=nan): the step had to leave everything as it was, but exp_avg_sq"),
        (LosesOne, "buckets were speculated, but"),
        (fixed("never"), "INCONCLUSIVE: nothing differs, but no bucket was speculated"),
        (fixed("always"), "the synchronous run spec"),
    ],
)
def test_what_digests_alone_do_not_show_is_caught(
    kind: type[AdamW], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_optimizer(monkeypatch, kind)
    assert run() == 1
    printed = capsys.readouterr().out
    assert words in printed and "verified" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "5"], "steps=5: expected at least 24"),
        (["--seed", "-1"], "seed=-1: expected a whole number from 0"),
        (["--device", "tpu"], "device=tpu: expected cpu or cuda"),
        (["--bucket-numel", "0"], "bucket_numel=0"),
        (["--dtype", "fp32", "--master-dtype", "split"], "master_dtype"),
        (["--json", "/no/such/folder/x.json"], "json=/no/such/folder/x.json: the file cannot be written"),
    ],
)
def test_bad_input_is_refused_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
