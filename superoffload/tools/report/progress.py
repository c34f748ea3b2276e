"""Shows progress: a tqdm bar on a terminal, plain lines if the output goes to a file."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 5.0
WIDE_ENOUGH_FOR_A_BAR = 118


class Progress:
    """Shows one line of text per step. `enabled=False` silences all of it."""

    def __init__(self, steps: int, title: str, enabled: bool = True) -> None:
        self._steps = steps
        self._title = title
        self._enabled = enabled
        self._narrow = shutil.get_terminal_size().columns < WIDE_ENOUGH_FOR_A_BAR
        self._bar = _bar(steps, self._narrow) if enabled and sys.stderr.isatty() else None
        self._done = 0
        self._last_line = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, text: str) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.set_description_str(" ".join(text.split()) if self._narrow else text, refresh=False)
            self._bar.update()
        elif self._enabled and self._line_is_due():
            print(f"{self._title} {self._done}/{self._steps}  {text}", flush=True)

    def note(self, text: str) -> None:
        """Prints a line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._enabled:
            print(text, flush=True)

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        if self._done not in (1, self._steps) and now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True


def _bar(steps: int, narrow: bool) -> Any:
    """Returns a tqdm bar; without tqdm prints a hint and returns None, and plain lines replace the bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        print("tqdm is not installed, so there is no progress bar: pip install 'superoffload[demo]'", file=sys.stderr)
        return None
    # In a narrow terminal the figures matter more than the bar.
    bar = "" if narrow else "{percentage:3.0f}%|{bar:10}| [{elapsed}<{remaining}] "
    return tqdm(total=steps, bar_format=bar + "{n_fmt}/{total_fmt} {desc}", dynamic_ncols=True)
