"""Lets the navigation and links of MkDocs name pages that this version does not have yet.

Only the pages listed here may be missing; any other broken link fails the build (`make docs` is strict).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

OPTIONAL = frozenset({"ranks.md", "deepspeed.md", "compatibility.md", "pipeline.md", "scaling.md", "benchmarks.md"})
_LINK = re.compile(r"\[([^\]]+)\]\(([\w-]+\.md)(#[\w-]*)?\)")


def on_config(config: Any) -> Any:
    """Removes missing optional pages from the navigation."""
    config["nav"] = present(config["nav"], Path(config["docs_dir"]))
    return config


def present(nav: list[Any], docs: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: present(target, docs)})
        elif target not in OPTIONAL or (docs / target).exists():
            kept.append(entry)
    return kept


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replaces links to missing optional pages by text that says so."""
    return without_missing_links(markdown, Path(config["docs_dir"]))


def without_missing_links(markdown: str, docs: Path) -> str:
    def replace(match: re.Match[str]) -> str:
        text, target = match.group(1), match.group(2)
        missing = target in OPTIONAL and not (docs / target).exists()
        return f"{text} (not in this version)" if missing else match.group(0)

    return _LINK.sub(replace, markdown)
