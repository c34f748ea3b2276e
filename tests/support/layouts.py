"""Ways to lay a model over ranks."""

from __future__ import annotations

import pytest

from tests.support.rank_processes import on_mesh, on_ranks, on_stages

RANKS = {"fsdp2": on_ranks, "mesh": on_mesh, "stages": on_stages}


def layouts(*names: str) -> pytest.MarkDecorator:
    """Runs a test once per layout (default: all), with its ``ranks``."""
    return pytest.mark.parametrize("ranks", [pytest.param(RANKS[name], id=name) for name in names or RANKS])
