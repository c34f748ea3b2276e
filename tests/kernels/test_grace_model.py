"""The static analysis of the kernels on Grace: every loop is far faster than memory, and the script means what it says.

The analysis itself needs clang, llvm-mca and AArch64's headers; how it reads assembly is tested without them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.in_turn("grace model")

SCRIPT = ROOT / "benchmarks" / "grace" / "mca.py"

# A step whose loop has one rare branch, with the rare block out of line as compilers place it.
ASSEMBLY = """
grace_step:                             // @grace_step
\t.cfi_startproc
// %bb.0:
\tcmp\tx1, x2
\tb.hs\t.LBB0_4
.LBB0_1:                                // =>This Inner Loop Header: Depth=1
\tfsqrt\tz0.s, p0/m, z1.s              // a comment
\tnots\tp2.b, p0/z, p1.b
\tb.ne\t.LBB0_3
.LBB0_2:
\tadd\tx1, x1, x15
\tcmp\tx1, x2
\tb.lo\t.LBB0_1
\tb\t.LBB0_4
.LBB0_3:
\tcompact\tz9.s, p1, z9.s
\tstr\tw16, [x3]
\tb\t.LBB0_2
.LBB0_4:
\tret
.Lfunc_end0:
\t.size\tgrace_step, .Lfunc_end0-grace_step
"""


@pytest.fixture(scope="module")
def mca() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grace_mca", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The script's JSON, from a run in a folder that is not the repository."""
    folder = tmp_path_factory.mktemp("grace")
    command = [sys.executable, str(SCRIPT), "--require", "--json", str(folder / "report.json")]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    if ran.returncode == 77:
        pytest.skip(ran.stdout.splitlines()[0])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return loaded


def test_every_loop_is_within_the_budget(mca: ModuleType, report: dict[str, Any]) -> None:
    names = ["step", "step_journaled", "undo", "replay", "publish"]
    rows = {(row["isa"], row["state"], row["name"]): row for row in report["rows"]}
    states = ["fp32", "split", "bf16", "bf16+split", "q8", "q8+split"]
    assert list(rows) == [(isa, state, name) for isa in ("sve", "neon") for state in states for name in names]
    assert 13.8 < report["limit"]["cycles_per_param"] < 14.0
    assert 8.9 < report["limit"]["by_state"]["bf16+split"] < 9.0
    assert 6.9 < report["limit"]["by_state"]["q8+split"] < 7.0
    for key, row in rows.items():
        budget = report["limit"]["by_state"][row["state"]]
        # An exact square root and division per vector of four take nine cycles of the only two pipes that do them.
        floor = 4.5 if row["name"] == "replay" else 2.25
        allowed = mca.ALLOWED.get((row["state"], row["name"]), 1)
        assert floor <= row["cycles_per_param"] <= allowed * budget, key
        assert row["of_budget"] == pytest.approx(row["cycles_per_param"] / budget), key


def test_the_claim_of_the_design_holds(report: dict[str, Any]) -> None:
    """Under three cycles for the plain step, so that less than a quarter of the cores can keep memory busy."""
    for row in report["rows"]:
        if row["name"] == "step" and row["state"] in ("fp32", "split"):
            assert row["cycles_per_param"] < 3, row["isa"]
            assert row["gb_per_s_per_core"] * 18 > 450, row["isa"]


def test_replay_in_one_pass_is_no_slower_than_undo_and_step(report: dict[str, Any]) -> None:
    for isa, state in {(row["isa"], row["state"]) for row in report["rows"]}:
        found = [row for row in report["rows"] if (row["isa"], row["state"]) == (isa, state)]
        cycles = {row["name"]: row["cycles_per_param"] for row in found}
        assert cycles["undo"] < cycles["replay"] < 1.05 * (cycles["undo"] + cycles["step"])


def test_even_if_every_vector_escapes_the_step_is_within_the_budget_of_fp32(report: dict[str, Any]) -> None:
    rows = [row for row in report["rows"] if row["name"] == "step_journaled"]
    for row in rows:
        # 8-bit moments, whose step has two passes, may take a quarter more.
        limit = report["limit"]["cycles_per_param"] * (1.25 if row["state"].startswith("q8") else 1)
        assert row["cycles_per_param"] < row["cycles_per_param_all_escape"] < limit, row


def test_the_hot_loop_is_cut_out_without_its_rare_branch(mca: ModuleType) -> None:
    [(usual, worst)] = mca.loop_bodies(ASSEMBLY, "step", mca.ONE_PASS)["fsqrt"]
    assert [line.split()[0] for line in usual] == ["fsqrt", "nots", "b.ne", "add", "cmp", "b.lo"]
    assert [line.split()[0] for line in worst[:5]] == ["fsqrt", "nots", "b.ne", "compact", "str"]
    assert mca.count("fsqrt", usual) == mca.count("fsqrt", worst) == 1


def test_an_access_that_moves_its_pointer_becomes_two(mca: ModuleType) -> None:
    lines = ["ldr\td20, [x9], #8", "str q1, [x8, #-16]!", "ldr q2, [x8, x9]", "st1w { z2.s }, p0, [x8, x1, lsl #2]"]
    first = ["ldr\td20, [x9]", "add x9, x9, #8", "add x8, x8, #-16", "str q1, [x8]"]
    assert mca.split_addressing(lines) == [*first, *lines[2:]]


def test_a_function_without_the_loop_is_an_error(mca: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no function grace_undo"):
        mca.loop_bodies(ASSEMBLY, "undo", mca.ONE_PASS)
    with pytest.raises(RuntimeError, match="found 0"):
        mca.loop_bodies(ASSEMBLY.replace("fsqrt", "fmul"), "step", mca.ONE_PASS)


def test_a_loop_over_the_budget_fails(mca: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mca, "find_tools", lambda compiler: mca.Tools([], "", {"compiler": "", "llvm-mca": ""}))
    for cycles, status in ((mca.budget() * 0.99, 0), (mca.budget() * 1.01, 1)):
        row = mca.row_of("step", "sve", "fp32", 9.0, cycles, cycles)
        monkeypatch.setattr(mca, "analyse", lambda tools, isa, state, bodies, row=row: [row])
        assert mca.main([]) == status


@pytest.mark.parametrize("arguments,status", [([], 0), (["--require"], 77)])
def test_missing_tools_are_said_loudly(
    mca: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert mca.main(arguments) == status
    assert capsys.readouterr().out.startswith("SKIPPED: ")
