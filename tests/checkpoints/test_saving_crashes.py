"""A save whose every call to the disk is in turn the last, fails or is cut short, and power cuts after every change.

Whatever happens, what is there is the checkpoint before or the new one, whole and right to the bit; a save that
returned is there even after a power cut; an error names path and advice; the next save sweeps what was left behind;
training goes on to the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import disk_faults, power_cuts


def test_every_call_to_the_disk(tmp_path: Path) -> None:
    done = disk_faults.run("tests.support.crash_program", str(tmp_path), limit=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    counts = result["counts"]
    print(counts)
    assert result["problems"] == []
    # Far fewer would mean that calls are no longer seen.
    least = {
        "calls of first": 50, "calls of next": 70, "calls of background": 70, "kills": 60, "EIO": 200, "ENOSPC": 50,
        "EINTR": 60, "a short write": 20, "failures of a read": 25, "errors": 200, "left something behind": 100,
        "power cuts": 500, "different disks after a power cut": 80,
    }  # fmt: skip
    assert {name: counts[name] for name in least if counts[name] < least[name]} == {}


def changes(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        (changes("create /a", "write /a 0 6162", "sync /a"), [{}, {"a": b"ab"}]),
        (changes("create /a", "write /a 0 6162", "sync /"), [{"a": b""}, {"a": b"\0\0"}, {"a": b"ab"}, {"a": b"a"}]),
        (changes("create /a", "write /a 0 6162", "sync /a", "sync /"), [{"a": b"ab"}]),
        (changes("rename /old /new"), [{"old": b"1"}, {"new": b"1"}]),
        (changes("rename /old /new", "sync /"), [{"new": b"1"}]),
        (changes("remove /old", "create /new"), [{"old": b"1"}, {}, {"old": b"1", "new": b""}, {"new": b""}]),
        (changes("mkdir /d", "create /d/a", "sync /"), [{"d": None}, {"d": None, "d/a": b""}]),
        (changes("mkdir /d", "create /d/a", "sync /d"), [{}, {"d": None, "d/a": b""}]),
    ],
)
def test_what_a_power_cut_leaves(made: list[list[str]], kept: list[power_cuts.Files]) -> None:
    """All that may be left, and nothing else, is tried; ``/old`` is there before."""
    before: power_cuts.Files = {"old": b"1"} if "old" in str(made) else {}
    disk = power_cuts.Disk(Path("/"), before)
    for change in made:
        disk.change(*change)
    left = list(disk.after_a_power_cut(range(100)))
    assert all(one in kept for one in left) and all(one in left for one in kept)
