"""What README links to and types exists, and its loop trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload.tools.cli import build_parser
from tests.support.checkout import ROOT

README = (ROOT / "README.md").read_text()


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if not target.startswith("https://")]
    assert len(targets) > 20
    for target in targets:
        name, _, anchor = target.partition("#")
        assert (ROOT / name).exists(), f"README links to {target}"
        assert not anchor or anchor in anchors(ROOT / name), f"README links to {target}, and there is no such heading"


def test_commands_of_the_readme_are_accepted() -> None:
    found = re.findall(r"(?m)^    superoffload ((?:verify|plan|doctor)[^#\n]*)", README)
    commands = [shlex.split(words) for words in found]
    assert len(commands) >= 3
    for words in commands:
        try:
            build_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"README: superoffload {' '.join(words)} is not accepted")


def test_the_loop_of_the_readme_trains() -> None:
    class Answer:
        def __init__(self, values: torch.Tensor) -> None:
            self.loss = values.square().mean()

    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
    layer = torch.nn.Linear(4, 2)
    before = layer.weight.detach().clone()
    names: dict[str, Any] = {"model": torch.nn.Sequential(layer), "data": [torch.randn(3, 4) for _ in range(3)]}
    names["model"].register_forward_hook(lambda module, given, answer: Answer(answer))
    exec(compile(block, "README.md", "exec"), names)
    assert names["optimizer"].stats()["steps"] == 3 and not torch.equal(layer.weight, before)
    names["optimizer"].close()
