"""`superoffload verify`: passes on the real optimizer, and catches optimizers that are wrong in known ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superoffload.adamw import AdamW
from superoffload.tools.cli import main, verify
from superoffload.tools.train.model import Transformer
from superoffload.tools.train.record import BUCKET_FATES
from tests.support.tiny_run import SIZES

TINY = f"{SIZES} --threads 2"


def run_verify(out: Path, *options: str) -> int:
    return main(["verify", *TINY.split(), "--out", str(out), *options])


def summary_of(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())


def test_default_events_are_verified_and_exercise_every_fate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.json"
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    assert run_verify(tmp_path, "--json", str(copy)) == 0
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.get_num_threads() == threads

    summary = summary_of(tmp_path)
    assert summary == json.loads(copy.read_text())
    assert summary["passed"] and summary["digests_compared"] == 24 * 5
    stats = summary["stats"]
    assert all(stats[f"buckets_{fate}"] > 0 for fate in BUCKET_FATES)
    assert stats["buckets_speculated"] == sum(stats[f"buckets_{fate}"] for fate in BUCKET_FATES)
    assert summary["stats_synchronous"]["buckets_speculated"] == 0
    assert stats["skipped_steps"] == summary["stats_synchronous"]["skipped_steps"] == 4

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 24 and all(line["equal"] for line in lines)
    digests = [line["digests"]["speculative"] for line in lines]
    assert digests == [line["digests"]["synchronous"] for line in lines]
    # Digests that never change would always be equal.
    assert len({digest["gradients"] for digest in digests}) == 24
    assert len({digest["master"] for digest in digests}) == 24 - 4 - 1, "4 skipped steps, 1 that raised"

    printed = capsys.readouterr().out
    for word in ("speculated", *BUCKET_FATES, "all equal"):
        assert word in printed
    page = (tmp_path / "report.html").read_text()
    assert "Verified: all 120 digests are equal" in page and "https://" not in page


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_split_masters_and_leaner_moments_are_verified(moments: str, tmp_path: Path) -> None:
    assert run_verify(tmp_path, "--master-dtype", "split", "--state-dtype", moments) == 0
    assert summary_of(tmp_path)["digests_compared"] == 24 * 5


def test_events_of_ones_own_need_not_exercise_everything(tmp_path: Path) -> None:
    assert run_verify(tmp_path, "--steps", "4", "--inject", "nan@2:late") == 0
    assert run_verify(tmp_path, "--steps", "3", "--inject", "") == 0
    assert summary_of(tmp_path)["events"] == {}


def test_state_changed_by_speculation_is_caught_and_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unit in the last place of one element of one moment, in the speculative run only."""

    class OffByOneBit(AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.stats()["buckets_speculated"] and self.stats()["steps"] == 3:
                parameter = self.param_groups[0]["params"][0]
                self.state[parameter]["exp_avg"].view(torch.int32).view(-1)[7] ^= 1

    monkeypatch.setattr("superoffload.tools.train.trainer.AdamW", OffByOneBit)
    assert run_verify(tmp_path, "--steps", "6", "--inject", "") == 1
    printed = capsys.readouterr().out
    assert "FAILED: step 3: equal gradients went in, but exp_avg came out different" in printed
    assert "exp_avg of embedding.weight in 1 of 8192 elements" in printed
    summary = summary_of(tmp_path)
    assert not summary["passed"] and summary["steps"] == 3, "it stops at the first difference"
    assert "Verification failed" in (tmp_path / "report.html").read_text()


def test_differences_of_bf16_moments_are_counted_in_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OffByOneBit(AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.stats()["buckets_speculated"]:
                for group in self.param_groups:
                    self.state[group["params"][0]]["exp_avg"].view(torch.int16).view(-1)[:2] ^= 1

    monkeypatch.setattr("superoffload.tools.train.trainer.AdamW", OffByOneBit)
    # An odd number of elements does not divide into words of four bytes.
    sizes = ("--hidden", "30", "--heads", "1", "--kv-heads", "1", "--mlp", "47")
    assert run_verify(tmp_path, "--steps", "2", "--inject", "", "--state-dtype", "bf16", *sizes) == 1
    printed = capsys.readouterr().out
    assert "exp_avg of embedding.weight in 2 of 7680 elements" in printed


def test_gradients_that_differ_are_not_blamed_on_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, calls = Transformer.loss, [0]

    def unrepeatable(self: Transformer, tokens: Tensor) -> Tensor:
        calls[0] += 1
        return loss(self, tokens) * (1.0 + 0.01 * calls[0])

    monkeypatch.setattr(Transformer, "loss", unrepeatable)
    assert run_verify(tmp_path, "--steps", "3", "--inject", "") == 1
    printed = capsys.readouterr().out
    assert "step 1: the gradients that went in differ" in printed
    assert "not repeatable" in printed and "at fault" not in printed


def test_skipped_step_that_moves_something_in_both_runs_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong in the same way in both runs, so that all digests agree."""

    class MovesOnSkip(AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.last_verdict is not None and self.last_verdict.found_inf:
                self.state[self.param_groups[0]["params"][0]]["exp_avg_sq"].add_(1.0)

    monkeypatch.setattr("superoffload.tools.train.trainer.AdamW", MovesOnSkip)
    assert run_verify(tmp_path, "--steps", "4", "--inject", "nan@2") == 1
    assert "step 2 (nan@2): the step had to leave everything as it was, but exp_avg_sq" in capsys.readouterr().out


def test_speculative_run_that_never_speculates_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NeverSpeculates(AdamW):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "speculation": "never"})

    monkeypatch.setattr("superoffload.tools.train.trainer.AdamW", NeverSpeculates)
    assert run_verify(tmp_path) == 1
    assert "FAILED: no bucket was speculated or committed, although" in capsys.readouterr().out


def test_nothing_committed_since_every_step_was_clipped_is_inconclusive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verify(tmp_path, "--max-grad-norm", "0.01") == 1
    printed = capsys.readouterr().out
    assert "INCONCLUSIVE: no bucket was speculated or committed or" in printed and "raise --max-grad-norm" in printed
    assert "FAILED" not in printed and "verified" not in printed
    summary = summary_of(tmp_path)
    assert not summary["passed"] and summary["problems"] == [] and "committed" in summary["inconclusive"]
    page = (tmp_path / "report.html").read_text()
    assert "Speculation changed nothing" in page and "Not verified." in page


def test_default_events_that_miss_a_fate_are_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "DEFAULT_INJECTION", "nan@4:late")
    assert run_verify(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "INCONCLUSIVE" in printed and "or abandoned," in printed and "--inject" in printed
    assert "raise --max-grad-norm" not in printed, "some steps were not clipped"


def test_uncounted_buckets_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class LosesOne(AdamW):
        def stats(self) -> Any:
            stats = dict(super().stats())
            stats["buckets_committed"] -= stats["buckets_committed"] > 0
            return stats

    monkeypatch.setattr("superoffload.tools.train.trainer.AdamW", LosesOne)
    assert run_verify(tmp_path, "--steps", "5", "--inject", "") == 1
    assert "buckets were speculated, but" in capsys.readouterr().out


def test_run_that_speculates_nothing_to_compare_with_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class AlwaysAlways(AdamW):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "speculation": "always"})

    monkeypatch.setattr("superoffload.tools.train.trainer.AdamW", AlwaysAlways)
    assert run_verify(tmp_path, "--steps", "5", "--inject", "") == 1
    assert "the synchronous run speculated" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--steps", "5"], "the default events need 24 steps"),
        (["--inject", "nan@"], "inject=nan@"),
        (["--device", "cuda:0"], "device=cuda:0: expected cpu"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run_verify(tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
