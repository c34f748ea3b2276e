"""The command under torchrun, on two hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.two_hosts import ADDRESSES, HOSTS, Link, missing_for_namespaces, on_host, slow

pytestmark = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))


def ended(programs: list[Any], seconds: float) -> list[tuple[int, str, str]]:
    """How the programs end and what they say; none is left behind."""
    try:
        return [(*program.communicate(timeout=seconds), program.returncode)[::-1] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.convergence
@pytest.mark.in_turn
def test_ranks_on_two_hosts_are_verified(tmp_path: Path) -> None:
    """Over a link of 50 Mbit/s."""
    with Link() as link:
        slow(link.names, megabits=50, queue=1 << 20)
        shape = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--node-rank")
        given = ("-m", "tests.convergence.short_runs", "--engine", "fsdp2", "--json", str(tmp_path / "x.json"))
        run = ("-m", "torch.distributed.run", *shape)
        ends = ended([on_host(link.names, host, *run, str(host), *given) for host in range(2)], 250.0)
    assert [code for code, *_ in ends] == [0, 0], ends
    assert "verified: 2 ranks on 2 hosts with fsdp2, 16 steps" in ends[0][2], ends
    assert "verified" not in ends[1][2], "one report is enough"
    summary = json.loads((tmp_path / "x.json").read_text())
    assert summary["passed"] and (summary["ranks"], summary["hosts"]) == (2, 2)


@pytest.mark.in_turn
def test_ranks_that_cannot_meet() -> None:
    with Link() as link:
        # one rank per host, without a launcher's own messages; gloo may wait five times as long as it is told to
        world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SUPEROFFLOAD_RANK_TIMEOUT": "1"}
        world["GLOO_SOCKET_IFNAME"] = "lo"
        ends = ended([on_host(link.names, h, "-m", "tests.convergence", RANK=str(h), **world) for h in range(2)], 100.0)
    for host, (code, error, _) in enumerate(ends):
        assert code != 0 and f"rank {host} on {HOSTS[host]} could not join the other ranks at {ADDRESSES[0]}" in error
        assert "GLOO_SOCKET_IFNAME" in error
