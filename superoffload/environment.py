"""What SUPEROFFLOAD_* variables of accelerators say. They are checked whenever an optimizer is made, also on the CPU:
a mistyped value is found at once, and not on the machine that has the accelerator."""

from __future__ import annotations

import os

from superoffload.errors import ArgumentError

DEVICE_TIMEOUT = "SUPEROFFLOAD_DEVICE_TIMEOUT"
TRANSFER = "SUPEROFFLOAD_TRANSFER"
TRANSFERS = ("auto", "narrow", "wide", "direct")
_DEVICE_SECONDS = 600.0


def check_environment() -> None:
    device_timeout()
    transfer_name()


def device_timeout() -> float:
    """Seconds until a device that does not answer is an error."""
    text = os.environ.get(DEVICE_TIMEOUT)
    if not text:
        return _DEVICE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"{DEVICE_TIMEOUT}={text!r}: expected a number of seconds above 0; unset: 600")
    return seconds


def transfer_name() -> str:
    """Of the transfer policy that was asked for; "auto": the fastest that a trial finds."""
    name = os.environ.get(TRANSFER) or "auto"
    if name not in TRANSFERS:
        raise ArgumentError(f"{TRANSFER}={name!r}: expected {', '.join(map(repr, TRANSFERS))}, or unset for 'auto'")
    return name
