"""Examines GPUs as torch sees them, their links to the host, and the links' speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from superoffload.host.system import System
from superoffload.tools.doctor.findings import Examination
from superoffload.tools.doctor.superchip import has_c2c

_COPY_BYTES = 256 << 20
_REPEATS = 5


@dataclass(frozen=True)
class Device:
    """Describes a GPU; `address` is its PCI address, such as 0000:17:00.0."""

    name: str
    memory_bytes: int
    address: str | None
    host_to_device: float | None = None
    device_to_host: float | None = None
    error: str | None = None


class Accelerators(Protocol):
    """Answers the examination's questions about GPUs; tests bring their own."""

    def missing(self) -> str | None:
        """Returns why there is no GPU; None if there is one."""

    def devices(self) -> list[Device]: ...

    def compiler(self) -> tuple[str, str]:
        """Returns the NVRTC that compiles for all devices here, or an empty name; and in that case, what was tried."""


class TorchAccelerators:
    """Asks torch, imported here only, about CUDA devices."""

    def missing(self) -> str | None:
        try:
            import torch
        except ImportError:
            return "torch is not installed"
        if torch.version.cuda is None:
            return "this build of torch has no CUDA"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"

    def devices(self) -> list[Device]:
        import torch

        return [self._device(torch, index) for index in range(torch.cuda.device_count())]

    def compiler(self) -> tuple[str, str]:
        import torch

        capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        found = []
        for major, minor in sorted(capabilities):
            tried: list[str] = []
            found.append(_compiler_for(f"sm_{major}{minor}", tried))
            if not found[-1]:
                return "", "; ".join(tried)
        return ", ".join(dict.fromkeys(found)), ""

    def _device(self, torch: Any, index: int) -> Device:
        properties = torch.cuda.get_device_properties(index)
        address = None
        if hasattr(properties, "pci_bus_id"):  # not in every version of torch
            domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
            address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        try:
            up, down = _measure_copies(torch, index)
        except RuntimeError as error:  # out of memory, or another program uses the device exclusively
            text = str(error).splitlines()[0]
            return Device(properties.name, properties.total_memory, address, error=text)
        return Device(properties.name, properties.total_memory, address, up, down)


def _compiler_for(arch: str, tried: list[str]) -> str:
    """Returns the first NVRTC that compiles for ``arch``, or an empty string."""
    from superoffload.links.cuda import nvrtc
    from superoffload.links.cuda.compile import closest

    for compiler in nvrtc.find(tried):
        try:
            closest(compiler, arch)
            return compiler.described
        except nvrtc.CompileError as error:
            tried.append(f"{compiler.name} for {arch}: {error}")
    return ""


def _measure_copies(torch: Any, index: int) -> tuple[float, float]:
    """Returns bytes per second (up, down) of large copies between pinned memory and device, one direction at a time."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    rates = []
    with torch.cuda.device(index):
        for target, source in ((device, host), (host, device)):
            best = float("inf")
            for _ in range(_REPEATS):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                target.copy_(source, non_blocking=True)
                ended.record()
                ended.synchronize()
                best = min(best, began.elapsed_time(ended) / 1e3)
            rates.append(_COPY_BYTES / best)
    return rates[0], rates[1]


def pcie_link(system: System, address: str | None) -> str | None:
    """Returns the link that the kernel negotiated, such as `32.0 GT/s x16`; None if it does not tell."""
    if address is None:
        return None
    folder = f"/sys/bus/pci/devices/{address}"
    speed, width = (system.text(f"{folder}/current_link_{name}") for name in ("speed", "width"))
    return f"{speed.removesuffix(' PCIe')} x{width}" if speed and width else None


def examine_gpu(system: System, accelerators: Accelerators) -> Examination:
    found = Examination("GPU")
    reason = accelerators.missing()
    found.facts["devices"] = []
    if reason is not None:
        found.ok(f"no GPU: {reason}; parameters on the CPU work without one")
        return found
    c2c = has_c2c(system)
    for index, device in enumerate(accelerators.devices()):
        link = "NVLink-C2C" if c2c else pcie_link(system, device.address)
        found.facts["devices"].append({**vars(device), "index": index, "link": link})
        _judge_device(found, index, device, link, c2c)
    _judge_compiler(found, *accelerators.compiler())
    return found


def _judge_compiler(found: Examination, compiler: str, tried: str) -> None:
    found.facts["nvrtc"] = compiler or None
    if compiler:
        found.ok(f"kernels are compiled by {compiler}")
        return
    found.warn(
        f"no NVRTC that knows every GPU here, so no kernels: gradients are copied one by one and summed by the "
        f"processors, with the same result, and placement= is refused (tried: {tried})",
        "install a torch with CUDA from NVIDIA's wheels, or superoffload[cuda12] or superoffload[cuda13]",
    )


def _judge_device(found: Examination, index: int, device: Device, link: str | None, c2c: bool) -> None:
    text = f"{index}: {device.name}, {device.memory_bytes / 2**30:.0f} GiB, link: {link or 'not shown'}"
    if device.host_to_device is None or device.device_to_host is None:
        found.ok(text)
        found.warn(
            f"{index}: the link could not be measured: {device.error or 'no reason given'}",
            "end the programs that use the GPU, and run doctor again",
        )
        return
    up, down = device.host_to_device / 1e9, device.device_to_host / 1e9
    found.ok(f"{text}, measured {up:.1f} GB/s up and {down:.1f} GB/s down")
    if c2c and min(up, down) < 150:
        found.warn(
            f"{index}: NVLink-C2C gives over 250 GB/s each way; here {min(up, down):.0f}",
            "bind the process to the processor's own node: numactl --cpunodebind=0 --membind=0",
        )
    elif not c2c and min(up, down) < 5:
        found.warn(
            f"{index}: {min(up, down):.1f} GB/s is less than eight lanes of PCIe 3 give",
            "look at current_link_width in /sys/bus/pci/devices, at the slot, and at virtualization of the link",
        )
