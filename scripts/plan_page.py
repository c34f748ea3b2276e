"""Puts the output of `python -m benchmarks.planned_and_published`, and its plots, into docs/plan.md."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from benchmarks.planned_and_published import comparison
from superoffload.tools.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"


def refresh() -> None:
    page = DOCS / "plan.md"
    marked = f"<!-- published -->\n{comparison()}\n<!-- /published -->"
    text = re.sub(r"<!-- published -->.*<!-- /published -->", lambda _: marked, page.read_text(), flags=re.DOTALL)
    page.write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        main(["plan", "--model", "7B", "--hardware", "gh200-96", "--plots", folder])
        for name in ("throughput", "memory"):
            (DOCS / f"images/plan_{name}.png").write_bytes((Path(folder) / f"{name}.png").read_bytes())


if __name__ == "__main__":  # python -m scripts.plan_page
    refresh()
