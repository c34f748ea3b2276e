"""A save whose every call to the disk is in turn the last, fails or is cut short, and power cuts after every change.

Whatever happens, what is there is the checkpoint before or the new one, whole and right to the bit; a save that
returned is there even after a power cut; an error names path and advice; the next save sweeps what was left behind;
training goes on to the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import disk_faults


def test_every_call_to_the_disk(tmp_path: Path) -> None:
    done = disk_faults.run("tests.checkpoints.crash_program", str(tmp_path), limit=280)
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
