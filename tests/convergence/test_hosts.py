"""The command under torchrun, on two hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.two_hosts import ADDRESSES, Link, missing_for_namespaces, on_host, slow

pytestmark = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))


@pytest.mark.convergence
@pytest.mark.in_turn
def test_ranks_on_two_hosts_are_verified(tmp_path: Path) -> None:
    """Over a link of 50 Mbit/s."""
    with Link() as link:
        slow(link.names, megabits=50, queue=1 << 20)
        shape = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--node-rank")
        given = ("-m", "tests.convergence.short_runs", "--engine", "fsdp2", "--json", str(tmp_path / "x.json"))
        run = ("-m", "torch.distributed.run", *shape)
        programs = [on_host(link.names, host, *run, str(host), *given) for host in range(2)]
        try:
            said = [program.communicate(timeout=250.0) for program in programs]
        finally:
            for program in programs:  # none is left behind
                program.kill()
                program.wait()
    assert [program.returncode for program in programs] == [0, 0], said
    assert "verified: 2 ranks on 2 hosts with fsdp2, 16 steps" in said[0][0], said
    assert "verified" not in said[1][0], "one report is enough"
    summary = json.loads((tmp_path / "x.json").read_text())
    assert summary["passed"] and (summary["ranks"], summary["hosts"]) == (2, 2)
