"""From a torch device to its link, over the fake driver; the node of the memory that it copies from and to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from superoffload.errors import KernelsUnavailable
from superoffload.links.cuda.pinned import free_bytes, node_of, place
from superoffload.links.cuda.start import LIBRARY_VARIABLE, cuda_link, kernels_for
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice

# ---- where pinned memory goes ---------------------------------------------------------------------------------------


def machine(root: Path, cpulists: list[str], device_node: int | None) -> tuple[Path, Path]:
    """Folders as the system shows them: NUMA nodes, and one device at 0000:17:00.0."""
    nodes, pci = root / "nodes", root / "pci"
    for i, cpus in enumerate(cpulists):
        (nodes / f"node{i}").mkdir(parents=True)
        (nodes / f"node{i}" / "cpulist").write_text(cpus + "\n")
        (nodes / f"node{i}" / "meminfo").write_text(f"Node {i} MemTotal: 2048 kB\nNode {i} MemFree: 1024 kB\n")
    (pci / "0000:17:00.0").mkdir(parents=True)
    if device_node is not None:
        (pci / "0000:17:00.0" / "numa_node").write_text(f"{device_node}\n")
    return pci, nodes


@pytest.mark.parametrize(
    ("cpulists", "device_node", "expected"),
    [
        (["0-7", "8-15"], 1, 1),  # next to the second socket
        (["0-7", "8-15"], -1, -1),  # the system does not know
        (["0-7"], None, -1),  # one node: no choice
        (["0-71", ""], 1, 0),  # a Superchip: node 1 is the device's own memory
        (["0-71", ""], -1, 0),
    ],
)
def test_the_node_of_a_device(tmp_path: Path, cpulists: list[str], device_node: int | None, expected: int) -> None:
    pci, nodes = machine(tmp_path, cpulists, device_node)
    assert node_of("0000:17:00.0".upper(), pci, nodes) == expected
    assert free_bytes(0, nodes) == 1 << 20
    assert free_bytes(9, nodes) == 0


def test_no_allocation_crosses_a_chunk() -> None:
    assert place(0, 100, 1024) == 0
    assert place(100, 100, 1024) == 256
    assert place(256, 768, 1024) == 256, "up to its end"
    assert place(900, 100, 1024) == 1024, "from 896 on it would end behind 1024"
    assert place(1024, 1024, 1024) == 1024


# ---- from a torch device to a link ----------------------------------------------------------------------------------


def test_a_link_for_a_torch_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything between parameters on a device and the link, but the device itself."""
    asked: list[str] = []

    def compile_for(arch: str) -> bytes:
        asked.append(arch)
        return IMAGE

    monkeypatch.setenv(LIBRARY_VARIABLE, fake.library)
    monkeypatch.setattr("superoffload.links.cuda.start.TorchDevice", lambda device: FakeDevice(fake))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("superoffload.links.cuda.compile.compile_kernels", compile_for)
    link = cuda_link(torch.device("cuda", 0), keep_grads=True)
    assert asked == ["sm_90"]
    assert not link.frees_gradients and link.pinned
    link.close()
    link = cuda_link(torch.device("cuda", 0), keep_grads=None)
    assert link.frees_gradients
    link.close()


def test_missing_kernels_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(arch: str) -> bytes:
        raise KernelsUnavailable(f"no kernels for {arch}: install something")

    monkeypatch.setattr("superoffload.links.cuda.compile.compile_kernels", unavailable)
    with pytest.warns(RuntimeWarning, match=r"no kernels for sm_80: install something.*with the same result"):
        assert kernels_for((8, 0)) == b""
