"""Ways to lay a model over ranks, each of them a column of docs/compatibility.md."""

from __future__ import annotations

import pytest

from tests.support.compatibility import compat
from tests.support.rank_processes import on_mesh, on_ranks, on_stages

RANKS = {"fsdp2": on_ranks, "mesh": on_mesh, "stages": on_stages}


def layouts(
    *rows: str, columns: tuple[str, ...] = tuple(RANKS), notes: dict[str, str] | None = None, refused: str | None = None
) -> pytest.MarkDecorator:
    """Runs a test once per column, with its ``ranks``. ``notes``, of columns, and ``refused``: as for ``compat``."""
    notes = notes or {}

    def marks(column: str) -> list[pytest.MarkDecorator]:
        return [compat(row, column, note=notes.get(column, ""), refused=refused) for row in rows]

    return pytest.mark.parametrize(
        "ranks", [pytest.param(RANKS[column], id=column, marks=marks(column)) for column in columns]
    )
