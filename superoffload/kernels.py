"""Chooses the instruction set of the Adam kernels, whose arithmetic docs/kernel.md defines. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from superoffload import _native
from superoffload.errors import ArgumentError
from superoffload.host.environment import tell_unknown_names

ISA_VARIABLE = "SUPEROFFLOAD_ISA"


def available_isas() -> list[str]:
    """Lists the instruction sets that this build has and this processor can run, slowest first."""
    return list(_native.available_isas())


def current_isa() -> str:
    """Names the instruction set in use: the fastest one unless ``set_isa`` or SUPEROFFLOAD_ISA chose another."""
    return str(_native.current_isa())


def set_isa(name: str) -> None:
    """Uses the kernels of one instruction set in this process from now on. All instruction sets give the same bits."""
    if not _native.set_isa(name):
        raise ArgumentError(
            f"instruction set {name!r}: not available here; this machine and build have {', '.join(available_isas())}: "
            "choose one of these, or unset it for the fastest"
        )


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Applies ``set_isa`` while the context lasts."""
    before = current_isa()
    set_isa(name)
    try:
        yield
    finally:
        set_isa(before)


def set_isa_from_environment() -> None:
    """Obeys SUPEROFFLOAD_ISA; runs when this module is first imported."""
    tell_unknown_names()
    name = os.environ.get(ISA_VARIABLE)
    if name:
        try:
            set_isa(name)
        except ArgumentError as error:
            raise ArgumentError(f"{ISA_VARIABLE}={name}: {error}") from None


set_isa_from_environment()
