"""Optimizers of parameters on the CPU that copy gradients during backward, also with ``speculation="never"``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from superoffload.links.host import HostLink


def over_host_link() -> AbstractContextManager[Any]:
    """Those made inside may publish in one phase and settle in another, as on an accelerator."""
    return mock.patch("superoffload.optimizer.engine_setup.link_for", lambda params, **_: HostLink())
