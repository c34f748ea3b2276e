"""Finds the machine that a plan is for: a built-in profile, or what `superoffload doctor --json` measured."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.host.untrusted import printable, read_json, shortened, shown
from superoffload.tools.plan.cards import SHARED_LINK
from superoffload.tools.plan.machines import GB, NUMBERS, Hardware
from superoffload.tools.plan.profiles import PROFILES, resembling

_SLOWEST, _LARGEST = 1e3, 1e18  # bytes, or bytes per second, of any measured value


def find_hardware(name: str, gpu: str | None = None, host_bandwidth: float | None = None) -> Hardware:
    """Returns a built-in profile, or the machine in a doctor's file; `gpu` names the profile for what was not measured.

    `host_bandwidth`: bytes per second and GPU, which replace the known ones.
    """
    if host_bandwidth is not None and not 0 < host_bandwidth < math.inf:
        raise ArgumentError(f"host_bandwidth={host_bandwidth / GB:g}: expected GB/s, a number above 0")
    if name in PROFILES:
        if gpu is not None:
            raise ArgumentError(f"gpu={gpu}: hardware={name} has its own GPU; give --gpu with a file of doctor only")
        return _given(PROFILES[name], host_bandwidth)
    if Path(name).suffix != ".json" and not os.path.exists(name):
        raise ArgumentError(
            f"hardware={name}: expected one of {', '.join(PROFILES)}, or a file written by superoffload doctor --json"
        )
    try:
        content = read_json(name)
    except OSError as error:
        raise ArgumentError(f"hardware={name}: cannot be read ({error.strerror})") from error
    except ArgumentError as error:
        raise ArgumentError(f"hardware={name}: not a file written by superoffload doctor --json ({error})") from error
    try:
        return from_doctor(content["machine"], gpu, printable(name), host_bandwidth)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"hardware={name}: not a file written by superoffload doctor --json") from error


def _given(hardware: Hardware, host_bandwidth: float | None) -> Hardware:
    if host_bandwidth is None:
        return hardware
    sources = {**hardware.sources, "host_bandwidth": "given (--host-bandwidth)"}
    measured = tuple(name for name in hardware.measured if name != "host_bandwidth")
    return replace(hardware, host_bandwidth=host_bandwidth, sources=sources, measured=measured)


def from_doctor(
    machine: Mapping[str, Any], gpu: str | None, source: str, host_bandwidth: float | None = None
) -> Hardware:
    """Takes measured values as measured; profile `gpu` supplies what doctor cannot know (the GPU's arithmetic).

    Without `gpu`, the device's name selects the profile.
    """
    devices = machine["GPU"]["devices"]
    base = _profile_for(devices, gpu, source, machine["memory"]["usable_bytes"])
    if machine["memory"]["usable_bytes"] is None:
        raise ArgumentError(
            f"hardware={source}: doctor could not tell how much memory there is; mount /proc there and run it again"
        )
    if "memory bandwidth" not in machine and host_bandwidth is None:
        raise ArgumentError(
            f"hardware={source}: written with --no-bandwidth, so the memory bandwidth is missing; run superoffload "
            f"doctor --json {source} there without --no-bandwidth, or give it: --host-bandwidth GB_PER_SECOND (per GPU)"
        )
    values = {**_host_values(machine, max(1, len(devices))), **_gpu_values(devices)}
    for what, value in values.items():
        if isinstance(value, bool) or not _SLOWEST <= value <= _LARGEST:
            raise ArgumentError(
                f"hardware={source}: {what} is {shown(value)}, expected a number from {_SLOWEST:g} to {_LARGEST:g}"
            )
    measured = tuple(name for name in NUMBERS if name in values)
    found = f"measured by doctor ({source})"
    shared = f"{found}, divided by the {len(devices)} GPUs that share it" if len(devices) > 1 else found
    sources = {**base.sources, **{name: shared if name.startswith("host") else found for name in measured}}
    if base.sources["collectives"] == SHARED_LINK and "link_up" in values:
        values["collectives"] = min(values["link_up"], values["link_down"]) / 2
        sources["collectives"] = SHARED_LINK
    name = f"{Path(source).stem} ({_name_of(devices[0])})" if devices else f"{Path(source).stem} + {base.name}"
    if devices:
        values["gpus_per_node"] = len(devices)
    return _given(replace(base, name=name, sources=sources, measured=measured, **values), host_bandwidth)


def _profile_for(devices: list[Mapping[str, Any]], gpu: str | None, source: str, usable: float | None) -> Hardware:
    if gpu is not None:
        if gpu not in PROFILES:
            raise ArgumentError(f"gpu={gpu}: expected one of {', '.join(PROFILES)}")
        return PROFILES[gpu]
    if not devices:
        room = "" if usable is None else f" (here: {usable / GB:.0f} GB)"
        raise ArgumentError(
            f"hardware={source}: doctor saw no GPU, and a plan is about training on one: pass --gpu with one of "
            f"{', '.join(PROFILES)} to put that GPU into this machine. To train on processors, superoffload.CPUAdamW "
            f"keeps 12 bytes of state per bf16 parameter in host memory{room}, beside 2 for it and 2 for its gradient"
        )
    base = resembling(devices[0]["name"])
    if base is None:
        raise ArgumentError(
            f"hardware={source}: there is no profile of {_name_of(devices[0])}; pass --gpu with the one of "
            f"{', '.join(PROFILES)} whose arithmetic is nearest; memory and link stay as doctor measured them"
        )
    return base


def _name_of(device: Mapping[str, Any]) -> str:
    return printable(shortened(str(device["name"])))


def _host_values(machine: Mapping[str, Any], sharing: int) -> dict[str, Any]:
    values = {"host_memory": machine["memory"]["usable_bytes"] / sharing}
    if "memory bandwidth" in machine:
        found = machine["memory bandwidth"]
        # What the kernels reached in a step; files of earlier versions have only what memory can do.
        values["host_bandwidth"] = found.get("step_bytes_per_second", found["bytes_per_second"]) / sharing
    return values


def _gpu_values(devices: list[Mapping[str, Any]]) -> dict[str, Any]:
    if not devices:
        return {}
    device = devices[0]
    values: dict[str, Any] = {"gpu_memory": device["memory_bytes"]}
    if device["host_to_device"] and device["device_to_host"]:
        values.update(link_up=device["host_to_device"], link_down=device["device_to_host"])
    return values
