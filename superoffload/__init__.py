"""AdamW keeps its state in host memory and steps during backward, bit for bit as if it had waited.

Names and modules are loaded when first used: `superoffload.checkpoints.save` needs no import of its own, and
`superoffload.kernels`, which chooses the instruction set, works where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from superoffload._version import __version__

if TYPE_CHECKING:
    from superoffload import checkpoints, errors, exporter, integrations, kernels, metrics, timeline
    from superoffload.adamw import AdamW
    from superoffload.cpu_adamw import CPUAdamW
    from superoffload.engine.verdict import Verdict
    from superoffload.metrics import Monitor

_HOMES = {
    "AdamW": "superoffload.adamw",
    "CPUAdamW": "superoffload.cpu_adamw",
    "Monitor": "superoffload.metrics",
    "Verdict": "superoffload.engine.verdict",
}

_MODULES = ("checkpoints", "errors", "exporter", "integrations", "kernels", "metrics", "timeline")

__all__ = [
    "AdamW",
    "CPUAdamW",
    "Monitor",
    "Verdict",
    "__version__",
    "checkpoints",
    "errors",
    "exporter",
    "integrations",
    "kernels",
    "metrics",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"superoffload.{name}")
    if name == "_native":  # asked for before the import system looks for it: here an absence can be explained
        return _extension()
    if name not in _HOMES:
        hint = "; 8-bit moments are AdamW(..., state_dtype='8bit')" if "8bit" in name.lower() else ""
        raise AttributeError(f"module 'superoffload' has no attribute {name!r}{hint}")
    return getattr(import_module(_HOMES[name]), name)


def _extension() -> Any:
    try:
        return import_module("superoffload._native")
    except ModuleNotFoundError as error:
        if error.name != "superoffload._native":
            raise
        raise ImportError(
            f"the compiled part of superoffload is not in {__path__[0]}. Is that a clone in whose folder Python was "
            "started? Then build it there (pip install --editable .), or start Python in another folder",
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
