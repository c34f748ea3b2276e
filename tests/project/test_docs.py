"""README and the documentation: their code runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.all import BENCHMARKS, parser_of
from superoffload.host.environment import OF_THE_BUILD, VARIABLES
from superoffload.tools.cli import build_parser
from tests.convergence.__main__ import make_parser as convergence_parser
from tests.support.checkout import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"(?m)^(?P<skip><!-- not run: [^\n]+ -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    """The blocks that run, in order; a comment `<!-- not run: why -->` right above one leaves it out."""
    found = _BLOCK.finditer(page.read_text())
    return [match["text"] for match in found if match["language"] == "python" and not match["skip"]]


class Answer:
    """What the documentation's `model(batch)` returns: something with a loss, as transformers' models do."""

    def __init__(self, values: torch.Tensor) -> None:
        self.loss = values.square().mean()
        self.sum = values.sum


class ExampleModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def forward(self, batch: torch.Tensor) -> Answer:
        return Answer(self.layers(batch))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What examples take for granted, in a folder of their own; ends what they start."""
    import superoffload

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = ExampleModel()
    data = [torch.randn(4, 8) for _ in range(3)]
    optimizer = superoffload.AdamW(model.parameters(), threads=1)
    values: dict[str, Any] = {
        "model": model,
        "data": data,
        "batch": data[0],
        "optimizer": optimizer,
        "superoffload": superoffload,
    }
    yield values
    optimizer.close()
    if "superoffload.integrations.deepspeed" in sys.modules:
        superoffload.integrations.deepspeed.disable()
    for name in ("optimizer", "exporter"):
        if hasattr(values.get(name), "close"):
            values[name].close()


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_code_of_the_page_runs(page: Path, names: dict[str, Any]) -> None:
    if "exporter" in page.read_text():
        pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'superoffload[metrics]'")
    if "integrations.deepspeed" in page.read_text():
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'superoffload[deepspeed]'")
    if "accumulate_dtype=" in "".join(python_blocks(page)) and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("accumulate_dtype= needs torch 2.10 or newer")
    for number, block in enumerate(python_blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_loop_of_the_readme_trains() -> None:
    (block,) = python_blocks(README)
    layer = torch.nn.Linear(4, 2)
    before = layer.weight.detach().clone()
    names: dict[str, Any] = {"model": torch.nn.Sequential(layer), "data": [torch.randn(3, 4) for _ in range(3)]}
    names["model"].register_forward_hook(lambda module, given, answer: Answer(answer))
    exec(compile(block, "README.md", "exec"), names)
    assert names["optimizer"].stats()["steps"] == 3 and not torch.equal(layer.weight, before)
    names["optimizer"].close()


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line of ours in the page's indented blocks, without `python -m`."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for line in re.findall(r"(?m)^ {4}(superoffload .+|python -m (?:benchmarks\.\w+|tests\.convergence)\b.*)$", text):
        for part in line.split("&&"):
            yield shlex.split(part.removeprefix("python -m "), comments=True)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def known_parsers() -> dict[str, argparse.ArgumentParser]:
    """By what begins a command: `superoffload verify`, `benchmarks.adam`."""
    own = {f"superoffload {name}": parser for name, parser in subparsers(build_parser()).items()}
    own["tests.convergence"] = convergence_parser()
    return own | {f"benchmarks.{name}": parser_of(name) for name in BENCHMARKS}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_commands_and_options_of_the_page_exist(page: Path) -> None:
    known = known_parsers()
    for words in commands(page):
        name, rest = (words[0], words[1:]) if "." in words[0] else (" ".join(words[:2]), words[2:])
        if name in known or name.startswith("superoffload "):
            try:
                known[name].parse_args(rest)
            except (SystemExit, KeyError):
                pytest.fail(f"{page.name}: {' '.join(words)} is not accepted")
    in_text = r"`(?:python -m )?(superoffload \w+|benchmarks\.\w+|tests\.convergence)((?: [^`\n]+)?)`"
    for name, options in re.findall(in_text, page.read_text()):
        for option in re.findall(r"--[\w-]+", options) if name in known else ():
            assert option in known[name].format_help(), f"{page.name}: {name} has no {option}"
    assert page != README or len(list(commands(page))) >= 3


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", _BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert linked.resolve().is_relative_to(page.parent), f"{page.name}: {target} is not on the site"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}, and there is no such heading"


def test_navigation_has_every_page() -> None:
    named = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in PAGES} == named


def test_every_environment_variable_is_in_the_reference() -> None:
    sources = [path.read_text() for path in (ROOT / "superoffload").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\"(SUPEROFFLOAD_[A-Z_]+)\"", text)}
    shown = set(re.findall(r"(?m)^\| `(SUPEROFFLOAD_[A-Z_]+)` \|", (ROOT / "docs/api.md").read_text()))
    assert used - shown == set(), "docs/api.md has no row for these"
    assert shown == {*VARIABLES, *OF_THE_BUILD}, "superoffload/host/environment.py knows others"
