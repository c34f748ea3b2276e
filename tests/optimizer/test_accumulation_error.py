"""The table of docs/edits.md that says how far off sums in bf16 are, measured again."""

from __future__ import annotations

import re

from benchmarks.accumulation import table
from tests.support.checkout import ROOT
from tests.support.fp32_gradients import needs_grad_dtype

PAGE = ROOT / "docs" / "edits.md"


def rows_of(text: str) -> dict[int, list[float]]:
    found = re.findall(r"^\| (\d+) \| (\d.*e.*) \| (\d.*e.*) \|$", text, re.MULTILINE)
    return {int(count): [float(bf16), float(fp32)] for count, bf16, fp32 in found}


@needs_grad_dtype
def test_the_table_of_the_page() -> None:
    """Within a factor of two: processors add up the products of a matrix in different orders."""
    written, measured = rows_of(PAGE.read_text()), rows_of("\n".join(table()))
    assert written.keys() == measured.keys() and 64 in written
    for count, errors in measured.items():
        for error, shown in zip(errors, written[count], strict=True):
            assert shown / 2 <= error <= 2 * shown, (count, error, shown)
        assert errors[0] > 1e5 * errors[1]
