"""Transfer policies: measured over the fake driver, chosen by what was measured, named by the environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from superoffload.benchmarking.transfer import Place, run_transfer
from superoffload.cli import main
from superoffload.cuda.link import CudaOptions
from superoffload.cuda.measure import Rates, choose, worth_measuring
from superoffload.cuda.pinned import free_bytes, node_of, place
from superoffload.cuda.start import LIBRARY_VARIABLE, cuda_link, kernels_for, open_link
from superoffload.cuda.transfer import DIRECT, NARROW, POLICIES, WIDE, TransferPolicy
from superoffload.environment import TRANSFER, TRANSFERS
from superoffload.errors import ArgumentError, KernelsUnavailable
from tests.fake_cuda import IMAGE, Fake, FakeDevice

CPUS = (-1,)


def options_of(fake: Fake) -> CudaOptions:
    return CudaOptions(image=IMAGE, timeout_seconds=60.0, library=fake.library)


def test_every_policy_is_measured(fake: Fake) -> None:
    where = Place(FakeDevice(fake), options_of(fake), torch.device("cpu"))
    rows, chosen = run_transfer(where, "bf16", 5000, 2)
    assert [(row["name"], row["bytes_per_param"]) for row in rows] == [("narrow", 2), ("wide", 4), ("direct", 2)]
    assert chosen in {row["name"] for row in rows}
    assert all(row["down_gb_per_s"] > 0 and row["up_gb_per_s"] > 0 and row["ratio"] > 0 for row in rows)
    rows, _ = run_transfer(where, "fp32", 2000, 1)
    assert [row["name"] for row in rows] == ["narrow", "direct"], "fp32 is as wide as it gets"


def test_without_a_gpu_the_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert main(["bench", "transfer"]) != 0
    assert "no CUDA device" in capsys.readouterr().err


def test_the_fastest_is_chosen_if_it_gains_enough() -> None:
    plain = Rates(2.0, 1.0, 1.5, 2)
    assert choose({"narrow": plain}) is NARROW
    assert choose({"narrow": plain, "wide": Rates(1.9, 1.0, 1.0, 4)}) is NARROW
    assert choose({"narrow": plain, "wide": Rates(1.0, 1.7, 1.0, 4)}) is WIDE
    assert choose({"narrow": plain, "direct": Rates(0.5, 1.0, 1.5, 2), "wide": Rates(3.0, 1.0, 3.0, 4)}) is DIRECT


def test_what_can_be_used() -> None:
    both = [torch.bfloat16, torch.float32]
    assert worth_measuring(both, kernels=True, pinned=True) == [NARROW, WIDE, DIRECT]
    assert worth_measuring([torch.float32], kernels=True, pinned=True) == [NARROW, DIRECT]
    assert worth_measuring(both, kernels=True, pinned=False) == [NARROW, WIDE]
    assert worth_measuring(both, kernels=False, pinned=True) == [NARROW]


def test_the_environment_names_a_policy(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(fake)
    for policy in (NARROW, WIDE, DIRECT):
        monkeypatch.setenv(TRANSFER, policy.name)
        link = open_link(device, options_of(fake), [torch.bfloat16], CPUS)
        assert link.policy is policy
        link.close()
    monkeypatch.setenv(TRANSFER, "narrowest")
    with pytest.raises(ArgumentError, match=r"SUPEROFFLOAD_TRANSFER='narrowest': expected 'auto', 'narrow'"):
        open_link(device, options_of(fake), [torch.bfloat16], CPUS)
    monkeypatch.setenv(TRANSFER, "wide")
    with pytest.raises(ArgumentError, match="needs kernels"):
        open_link(device, replace(options_of(fake), image=b""), [torch.bfloat16], CPUS)
    assert set(TRANSFERS) == {"auto", *POLICIES}


def test_a_link_without_kernels_needs_no_measurement(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRANSFER, raising=False)
    link = open_link(FakeDevice(fake), replace(options_of(fake), image=b""), [torch.bfloat16], CPUS)
    assert link.policy is NARROW
    link.close()


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
    assert place(900, 100, 1024) == 1024, "from 896 on it would end behind 1024"
    assert place(1024, 1024, 1024) == 1024


def test_what_is_chosen_at_the_start_is_what_was_measured(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRANSFER, raising=False)
    monkeypatch.setattr("superoffload.cuda.start._TRIAL_NUMEL", 3000)
    seen: list[dict[str, Rates]] = []

    def chosen(rates: dict[str, Rates]) -> TransferPolicy:
        seen.append(rates)
        return WIDE

    monkeypatch.setattr("superoffload.cuda.start.choose", chosen)
    before = fake.registered_bytes()
    link = open_link(FakeDevice(fake), options_of(fake), [torch.bfloat16, torch.float32], CPUS)
    assert link.policy is WIDE and list(seen[0]) == ["narrow", "wide", "direct"]
    link.close()
    assert fake.registered_bytes() == before, "trials give their memory back"


# ---- from a torch device to a link ----------------------------------------------------------------------------------


def test_a_link_for_a_torch_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything between parameters on a device and the link, but the device itself."""
    asked: list[str] = []

    def compile_for(arch: str) -> bytes:
        asked.append(arch)
        return IMAGE

    monkeypatch.setenv(LIBRARY_VARIABLE, fake.library)
    monkeypatch.setenv(TRANSFER, "direct")
    monkeypatch.setattr("superoffload.cuda.start.TorchDevice", lambda device: FakeDevice(fake))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("superoffload.cuda.compile.compile_kernels", compile_for)
    link = cuda_link(torch.device("cuda", 0), keep_grads=True, dtypes=[torch.bfloat16], cpus=CPUS)
    assert asked == ["sm_90"]
    assert link.policy is DIRECT and not link.frees_gradients and link.pinned
    link.close()
    assert cuda_link(torch.device("cuda", 0), keep_grads=None, dtypes=[torch.bfloat16], cpus=CPUS).frees_gradients


def test_missing_kernels_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(arch: str) -> bytes:
        raise KernelsUnavailable(f"no kernels for {arch}: install something")

    monkeypatch.setattr("superoffload.cuda.compile.compile_kernels", unavailable)
    with pytest.warns(RuntimeWarning, match=r"no kernels for sm_80: install something.*with the same result"):
        assert kernels_for((8, 0)) == b""
