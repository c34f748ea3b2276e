"""Saves checkpoints while every call to the disk in turn is the last, fails or is cut short, and loads what is left.

Run with the library of tests/support/disk_faults.py: ``python -m tests.checkpoints.crash_program FOLDER``. It prints
counts and problems.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from superoffload import AdamW, checkpoints
from superoffload.errors import DiskError, SuperOffloadError
from tests.checkpoints import power_cuts
from tests.convergence.local_ranks import PRELOAD
from tests.support.adamw_training import model_of, train
from tests.support.disk_faults import KILL, KILLED, SHORT, TEAR, Record, Watch

SEEDS = range(2)  # partial losses that are tried after each call
ADVICE = ("free some space", "save again, to another place", "remove them by hand")
RETRIED = ("open", "read", "write", "sync", "truncate", "lock")  # by Python, where a signal interrupts them
LEFT_BEHIND = (".writing-step-2-0123456789ab", ".removing-step-0-0123456789ab")  # by a process that is gone


class Training:
    """The same in every process: the state after a step depends on nothing but the number of steps."""

    def __init__(self, steps: int, seed: int = 0) -> None:
        self.model = model_of(torch.bfloat16, seed)
        self.optimizer = AdamW(self.model.parameters(), threads=1, max_grad_norm=1.0)
        self.done = 0
        self.steps(steps)

    def steps(self, count: int) -> None:
        for _ in range(count):
            train(self.model, self.optimizer, range(self.done, self.done + 1))
            self.done += 1


class Scenario:
    """What is there before a save, and the save."""

    def __init__(self, name: str, above: Path) -> None:
        self.name, self.before = name, above / f"{name}-before"
        self.folder = "runs/step-2" if name != "first" else "new/runs/step-2"
        self.before.mkdir()
        self.record = Record([], [])  # of a save that nothing disturbs

    def prepare(self) -> None:
        """In a child, since it needs an optimizer: no thread may run where children are forked."""
        if self.name != "first":
            training, runs = Training(1), self.before / "runs"
            checkpoints.save(runs / "step-1", training.model, training.optimizer)
            for name in LEFT_BEHIND:
                (runs / name).mkdir()
                (runs / name / "rank-00000.safetensors").write_bytes(b"half")
            (runs / "latest").symlink_to("step-1")

    def copy(self, root: Path) -> Path:
        shutil.copytree(self.before, root, symlinks=True)
        return root

    def save(self, root: Path, training: Training) -> None:
        given: Any = (root / self.folder, training.model, training.optimizer)
        if self.name == "background":
            checkpoints.save_in_background(*given, keep=1).wait(60)
        else:
            checkpoints.save(*given, keep=None if self.name == "first" else 1)


class Check:
    """Counts what was tried and what was wrong about what was left."""

    def __init__(self) -> None:
        straight, self.digests = Training(0), dict[int, Any]()  # of the state, by step
        for step in range(1, 4):
            straight.steps(1)
            self.digests[step] = straight.optimizer.state_digests()
        self._reader = Training(0, seed=8)
        self.training = Training(2)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(what)

    def whole(self, scenario: Scenario, root: Path, what: str, *, saved: bool) -> None:
        """``saved``: the save returned, so the new one must be there; and whatever is there is right to the bit."""
        runs = (root / scenario.folder).parent
        steps = sorted(int(path.name[5:]) for path in runs.glob("step-*"))
        for step in steps:
            try:
                checkpoints.load(runs / f"step-{step}", self._reader.model, self._reader.optimizer)
                self.expect(self._reader.optimizer.state_digests() == self.digests[step], f"{what}: step-{step}: bits")
            except SuperOffloadError as error:
                self.problems.append(f"{what}: step-{step} does not load: {error}")
        found = checkpoints.latest(runs)
        self.expect((found and found.name) == (f"step-{steps[-1]}" if steps else None), f"{what}: latest is {found}")
        self.expect(bool(steps) or scenario.name == "first", f"{what}: no checkpoint is left")
        self.expect(2 in steps or not saved, f"{what}: a save that returned is lost")

    def next_save(self, scenario: Scenario, root: Path, what: str) -> None:
        runs = (root / scenario.folder).parent
        if any(runs.glob(".*")):
            self.counts["left something behind"] += 1
            checkpoints.save(runs / "step-3", self.training.model, self.training.optimizer, keep=3)
        hidden = [path.name for path in runs.glob(".*")]
        self.expect(not hidden, f"{what}: the next save leaves {hidden}")
        shutil.rmtree(root)


def forked(work: Callable[[], None]) -> int:
    """The status with which a child ends."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(scenario: Scenario, above: Path, watch: Watch) -> list[tuple[Path, str, bool]]:
    """A child killed before each call that changes the disk (so at all others too), and within each write.

    What was done, where, and whether it was.
    """
    done = []

    def attempt(root: Path, at: int, fault: int) -> int:
        def work() -> None:
            training = Training(2)
            with watch.faults(root, at, fault):
                scenario.save(root, training)
            (above / "record").write_text(json.dumps([watch.record.calls, watch.record.changes]))

        return forked(work)

    whole = scenario.copy(above / f"{scenario.name}-whole")
    assert attempt(whole, 0, 0) == 0
    scenario.record = Record(*json.loads((above / "record").read_text()))
    for at, (call, path, needs_space) in enumerate(scenario.record.calls, 1):
        if call == "sync" or not (needs_space or call == "remove") or scenario.name == "background":
            continue
        for fault in (KILL, TEAR) if call == "write" else (KILL,):
            root = scenario.copy(above / f"{scenario.name}-killed-{at}-{-fault}")
            status = attempt(root, at, fault)
            done.append((root, f"{scenario.name}: killed at call {at}, {call} of {Path(path).name}", status == KILLED))
    return done


def fail_each_call(scenario: Scenario, above: Path, watch: Watch, check: Check) -> None:
    for at, (call, path, needs_space) in enumerate(scenario.record.calls, 1):
        retried = (errno.EINTR,) if call in RETRIED else ()
        short = (SHORT,) if call == "write" else ()
        full = (errno.ENOSPC,) if needs_space else ()
        if scenario.name == "background" and at % 3:
            continue  # the same calls as those of ``next``, in another thread
        for fault in (errno.EIO, *full, *retried, *short) if scenario.name == "next" else (errno.EIO, *full):
            name = "a short write" if fault == SHORT else errno.errorcode[fault]
            what = f"{scenario.name}: {name} at call {at}, {call} of {Path(path).name}"
            root = scenario.copy(above / "failed")
            error = None
            with watch.faults(root, at, fault, lasting=fault == errno.ENOSPC):
                try:
                    scenario.save(root, check.training)
                except Exception as caught:
                    error = caught
            check.counts[name] += 1
            check.counts["failures of a read"] += call == "read"
            if error is not None:
                check.counts["errors"] += 1
                clear = isinstance(error, SuperOffloadError) and str(root / scenario.folder) in str(error)
                check.expect(clear, f"{what}: {error!r}")
                check.expect(fault not in (*retried, *short), f"{what}: an error")
                if fault == errno.ENOSPC:
                    told = any(advice in str(error) for advice in ADVICE)
                    check.expect(isinstance(error, DiskError) and told, f"{what}: {error!r}")
            check.whole(scenario, root, what, saved=error is None)
            check.next_save(scenario, root, what)


def cut_the_power(scenario: Scenario, above: Path, check: Check) -> None:
    """After each change to the disk, and once the save has returned."""
    before = scenario.copy(above / "before")
    changes = scenario.record.changes
    seen = set()
    recorded = above / f"{scenario.name}-whole"
    for count in range(len(changes) + 1):
        disk = power_cuts.Disk(recorded, power_cuts.read(before))
        for change in changes[:count]:
            disk.change(*change)
        for files in disk.after_a_power_cut(SEEDS):
            check.counts["power cuts"] += 1
            key = (count == len(changes), repr(sorted(files.items())))
            if key in seen:
                continue
            seen.add(key)
            check.counts["different disks after a power cut"] += 1
            root = above / "cut"
            power_cuts.write(root, files)
            what = f"{scenario.name}: power cut after change {count} of {len(changes)}"
            check.whole(scenario, root, what, saved=count == len(changes))
            shutil.rmtree(root)
    check.expect(disk.now() == power_cuts.read(recorded), f"{scenario.name}: not every change was seen")
    shutil.rmtree(before)


def main() -> None:
    for module in PRELOAD:  # what an optimizer would load in every child
        importlib.import_module(module)
    above, watch = Path(sys.argv[1]), Watch()
    scenarios = [Scenario(name, above) for name in ("first", "next", "background")]
    for scenario in scenarios:
        assert forked(scenario.prepare) == 0
    children = {scenario.name: killed(scenario, above, watch) for scenario in scenarios}
    torch.set_num_threads(1)
    check = Check()
    for scenario in scenarios:
        cut_the_power(scenario, above, check)
        for root, what, was_killed in children[scenario.name]:
            check.counts["kills"] += 1
            check.expect(was_killed, f"{what}: it was not")
            check.whole(scenario, root, what, saved=False)
            check.next_save(scenario, root, what)
        fail_each_call(scenario, above, watch, check)
        check.counts[f"calls of {scenario.name}"] = len(scenario.record.calls)
    check.training.steps(1)
    check.expect(check.training.optimizer.state_digests() == check.digests[3], "training goes on with other bits")
    print(json.dumps({"counts": check.counts, "problems": check.problems}))


if __name__ == "__main__":
    main()
