"""Checks the SUPEROFFLOAD_* variables, and warns of names that superoffload does not read. Every new optimizer checks
them, also on the CPU, so a mistyped name shows before the run reaches a machine with an accelerator."""

from __future__ import annotations

import os
from difflib import get_close_matches

from superoffload.errors import ArgumentError, warn

DEVICE_TIMEOUT = "SUPEROFFLOAD_DEVICE_TIMEOUT"
_DEVICE_SECONDS = 600.0

PREFIX = "SUPEROFFLOAD_"
TAKE_OVER = "SUPEROFFLOAD_TAKE_OVER"  # DeepSpeed's own "device": "cpu" selects superoffload; `superoffload run` sets it
VARIABLES = ("SUPEROFFLOAD_ISA", DEVICE_TIMEOUT, "SUPEROFFLOAD_RANK_TIMEOUT", "SUPEROFFLOAD_LIBCUDA", TAKE_OVER)
OF_THE_BUILD = tuple(PREFIX + name for name in ("BUILD_ISAS", "BUILD_DIR", "DEBUG", "TARGET", "WERROR", "DEBIAN"))
_told: set[str] = set()


def check_environment() -> None:
    tell_unknown_names()
    device_timeout()


def tell_unknown_names() -> None:
    """Warns once of each unknown variable with our prefix; raises no error, since other software may read it."""
    for name, value in os.environ.items():
        ours = name.upper().startswith(PREFIX)
        if not ours or not value or name in VARIABLES or name in OF_THE_BUILD or name in _told:
            continue
        _told.add(name)
        known = {variable.removeprefix(PREFIX): variable for variable in VARIABLES}
        nearest = get_close_matches(name.upper().removeprefix(PREFIX), known, n=1)
        advice = f"did you mean {known[nearest[0]]}?" if nearest else "nothing here has a similar name."
        warn(f"{name}={value!r} in the environment has no effect; {advice} superoffload reads {', '.join(VARIABLES)}")


def device_timeout() -> float:
    """Returns the seconds after which a device that does not answer is an error."""
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
