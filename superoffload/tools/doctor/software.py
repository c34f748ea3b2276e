"""Examines versions of the packages that superoffload works with, and which adapters work with them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from superoffload import __version__
from superoffload.integrations.deepspeed.switch import NEWEST, OLDEST
from superoffload.tools.doctor.findings import Examination

PACKAGES = ("torch", "numpy", "deepspeed", "transformers", "accelerate", "matplotlib")
_OLDEST_TORCH = (2, 6)


@dataclass(frozen=True)
class Adapter:
    """Describes an adapter; `needs` maps packages to the oldest version that has what the adapter uses.

    `newest` maps those whose private names it knows to the last version that it accepts.
    """

    name: str
    needs: Mapping[str, tuple[int, ...]]
    newest: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


ADAPTERS = (
    Adapter("deepspeed", {"torch": _OLDEST_TORCH, "deepspeed": OLDEST}, {"deepspeed": NEWEST}),
    Adapter("fsdp2", {"torch": _OLDEST_TORCH}),
    Adapter("ddp", {"torch": _OLDEST_TORCH}),
    Adapter("transformers", {"torch": _OLDEST_TORCH, "transformers": (5,), "accelerate": (1, 10)}),
)

Lookup = Callable[[str], str | None]


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def examine_software(lookup: Lookup = installed_version) -> Examination:
    found = Examination("software")
    versions = {package: lookup(package) for package in PACKAGES}
    found.facts["versions"] = {"superoffload": __version__, "python": platform.python_version(), **versions}
    present = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    found.ok(f"superoffload {__version__}, Python {platform.python_version()}" + (f", {present}" if present else ""))
    _judge_torch(found, versions["torch"])
    adapters: dict[str, Any] = {}
    for adapter in ADAPTERS:
        adapters[adapter.name] = state = adapter_state(adapter, lookup)
        found.ok(f"adapter {adapter.name}: {state}")
    found.facts["adapters"] = adapters
    return found


def _judge_torch(found: Examination, torch: str | None) -> None:
    oldest = ".".join(map(str, _OLDEST_TORCH))
    if torch is None:
        found.problem("torch is not installed: only superoffload.kernels works", f"pip install 'torch>={oldest}'")
    elif release(torch) < _OLDEST_TORCH:
        found.problem(f"torch {torch} is older than {oldest}", f"pip install --upgrade 'torch>={oldest}'")


def adapter_state(adapter: Adapter, lookup: Lookup) -> str:
    """Returns `works`, or what keeps the adapter from working."""
    for package, oldest in adapter.needs.items():
        have = lookup(package)
        if have is None:
            return f"needs {package}, which is not installed"
        if release(have) < oldest:
            return f"needs {package} >= {'.'.join(map(str, oldest))}, found {have}"
        newest = adapter.newest.get(package)
        if newest is not None and release(have) > newest:
            return f"needs {package} <= {'.'.join(map(str, newest))}, found {have}"
    return "works"


def release(text: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without what follows them: `2.13.0+cpu` is (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
