"""The table of docs/compatibility.md, from the marks of tests: `python -m tests.support.compatibility` writes the page.

A test marked ``@compat(row, column)`` shows that what the row says works in that column. With ``refused="text"`` it
shows that it is refused with an error that contains the text, which the fixture ``refusal`` checks. So the page says
what passing tests say; tests/project/test_compatibility_page.py fails where page and marks differ or a cell is empty.

A test with the column "stand_in" runs once more, with its optimizers over the CUDA link and a fake driver
(tests/support/over_stand_in.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.support.checkout import ROOT
from tests.support.over_stand_in import is_over_stand_in

PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = {
    "single": "one process",
    "stand_in": "one GPU (stand-in)",
    "fsdp2": "FSDP2",
    "mesh": "FSDP2 x TP",
    "stages": "pipeline stages",
    "deepspeed": "DeepSpeed ZeRO-3",
}
_NAMES_IN_A_CELL = 2


def compat(row: str, *columns: str, refused: str | None = None, note: str = "") -> pytest.MarkDecorator:
    """``note``: what is different there, in a few words."""
    assert columns and set(columns) <= set(COLUMNS), columns
    return pytest.mark.compat(row, *columns, refused=refused, note=note)


class Refusal:
    """Checks that an error is the one that the marks of the test quote."""

    def __init__(self, expected: list[str]) -> None:
        self._expected = expected

    def check(self, text: str) -> None:
        assert self._expected, "a test that uses `refusal` needs a compat mark with refused=..."
        for expected in self._expected:
            assert expected in text, f"the page quotes {expected!r}, the error is {text!r}"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with pytest.raises(Exception) as caught:
            yield
        self.check(str(caught.value))


@dataclass
class Cell:
    """What the tests say of one row and column."""

    works: list[str] = field(default_factory=list)
    refused: str | None = None
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        outcome = "works" if self.refused is None else f"refused: “{self.refused}”"
        notes = "".join(f", {note}" for note in dict.fromkeys(self.notes))
        return f"{outcome}{notes} ({_links(self.works)})"


Table = dict[str, dict[str, Cell]]


def _links(tests: list[str]) -> str:
    files: dict[str, list[str]] = {}
    for test in tests:
        path, _, name = test.partition("::")
        files.setdefault(path, []).append(name)
    parts = []
    for path, names in files.items():
        shown = ", ".join(f"`{name}`" for name in list(dict.fromkeys(names))[:_NAMES_IN_A_CELL])
        parts.append(f"{path.removeprefix('tests/')}: {shown}")
    return "; ".join(parts)


class Collector:
    """A pytest plugin that reads the marks of all tests."""

    def __init__(self) -> None:
        self.table: Table = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("compat"):
                own = getattr(getattr(item, "callspec", None), "marks", ())  # of one set of parameters
                test = item.nodeid if mark in own else item.nodeid.partition("[")[0]
                row, *columns = mark.args
                for column in columns:
                    if is_over_stand_in(item) == (column == "stand_in"):
                        self._add(self.table.setdefault(row, {}).setdefault(column, Cell()), test, mark)

    def _add(self, cell: Cell, test: str, mark: pytest.Mark) -> None:
        if test not in cell.works:
            cell.works.append(test)
        if mark.kwargs.get("refused"):
            cell.refused = mark.kwargs["refused"]
        if mark.kwargs.get("note"):
            cell.notes.append(mark.kwargs["note"])


def collect() -> Table:
    """In this process; nothing runs."""
    collector = Collector()
    where = os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests"], plugins=[collector])
    finally:
        os.chdir(where)
    if status != 0:
        raise SystemExit(f"collecting the tests failed:\n{output.getvalue()[-3000:]}")
    return collector.table


def page(table: Mapping[str, Mapping[str, Cell]], sections: Mapping[str, list[str]]) -> str:
    lines = [
        "# Compatibility",
        "",
        "What people do around an optimizer, and what happens with superoffload. Written from the marks of the tests",
        "by `python -m tests.support.compatibility`: every cell names tests of the suite that show it, and a quoted",
        "error is compared with the one that is raised. File names are below `tests/`.",
        "",
        "*works* means: as `torch.optim.AdamW` doing the same, within rounding, and with the bits of our own",
        "synchronous mode; under DeepSpeed as stock ZeRO-Offload.",
        "",
        "*refused* means: an error, of superoffload, torch or the framework, from which the quotation is.",
        "",
        "*one GPU (stand-in)*: the same tests once more, over the CUDA link and a fake driver, with gradients freed as",
        "they are packed, which is what an accelerator gets. *Slower*: a gradient that is needed again is copied back",
        "from host memory, with one warning that names the fast way. What only a GPU can show is in `tests/gpu`.",
        "",
        "*FSDP2 x TP*: four ranks; `fully_shard` over two, and two share each matrix. *Pipeline stages*: two ranks",
        "with different parameters under different names. Activations go to the second rank, and their gradients",
        "come back; in the rows of Accelerate, Trainer and TRL each rank has another number of layers instead.",
        "",
    ]
    for section, rows in sections.items():
        lines += [f"## {section}", "", f"| | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
        for row in rows:
            cells = [table[row][column].text() if column in table.get(row, {}) else "" for column in COLUMNS]
            lines.append(f"| {row} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


SECTIONS: dict[str, list[str]] = {
    "Steps and gradients": [
        "add_param_group at any time",
        "every scheduler of torch.optim.lr_scheduler",
        "lr changed between backward and step()",
        "closure",
        "optimizer hooks (register_step_pre_hook and its kin)",
        "hooks of parameters that change or read gradients",
        "gradient accumulation",
        "gradient accumulation with accumulate()",
        "gradient accumulation in fp32 of bfloat16 and float16 parameters (accumulate_dtype)",
        "zero_grad(set_to_none=True or False)",
        "a step with some or no gradients",
        "delivery on demand: the bits of eager delivery",
        "clip_grad_norm_ by the user after backward",
        "clip_grad_value_ by the user after backward",
        "gradients edited, replaced or removed before step()",
        "GradScaler",
        "plain loss scaling: scaled loss, gradients divided before step()",
    ],
    "Parameters": [
        "parameters written by the user (load_state_dict, clamp, re-initialization)",
        "parameters frozen and unfrozen mid-run",
        "EMA and SWA, averages swapped in",
        "tied parameters",
        "zero-size parameters",
        "scalar parameters",
        "non-contiguous parameters",
        "mixed float32, bfloat16 and float16 parameters",
        "a model loaded as float32 and converted to bfloat16; masters keep the float32 bits",
        "several optimizers on one model",
        "copy.deepcopy and pickle of the optimizer",
    ],
    "Models": [
        "autocast",
        "activation checkpointing",
        "torch.compile of the model: as eager, and speculative = synchronous to the bit",
    ],
    "Frameworks": [
        "Accelerate: prepare, accumulate, clip_grad_norm_",
        "Hugging Face Trainer, and its resume",
        "TRL's SFTTrainer",
        "TRL's GRPOTrainer and RLOOTrainer",
        "PEFT: LoRA adapters",
        "Lightning: automatic and manual optimization",
    ],
    "Checkpoints": [
        "save, kill, resume: the same losses and bits as a run never stopped",
        "a checkpoint in the middle of an accumulation window: that of the last finished step",
        "killed while it saves: the checkpoint before loads",
        "a truncated, bit-flipped or foreign checkpoint",
        "saved in the background while training goes on",
        "saved by some ranks, loaded by another number of them",
        "torch.distributed.checkpoint, with another number of ranks",
        "get_optimizer_state_dict and set_optimizer_state_dict",
        "state of torch.optim.AdamW taken over, and given back",
        "the model exported as safetensors for from_pretrained",
    ],
}


def problems(table: Table) -> list[str]:
    """Rows that no section has, sections' rows without tests, empty cells."""
    known = [row for rows in SECTIONS.values() for row in rows]
    found = [f"no section has the row {row!r}" for row in table if row not in known]
    return found + [f"{row} / {column}" for row in known for column in COLUMNS if column not in table.get(row, {})]


def main() -> None:
    table = collect()
    text = page(table, SECTIONS)
    found = problems(table)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        found.append(
            "docs/compatibility.md is not what the tests say; write it with python -m tests.support.compatibility"
        )
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
