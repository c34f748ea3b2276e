"""Writes the folder a run leaves behind: metrics.jsonl, summary.json, plot.png, report.html."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from superoffload.errors import ArgumentError, SuperOffloadError


class RunFolder:
    """Creates the folder at once and fails if it cannot be written, so that no training is lost to a bad path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # An earlier run's results must not pass for those of a run that fails before it writes its own.
            for stale in (self.summary_path, self.plot_path, self.timeline_path, self.report_path):
                stale.unlink(missing_ok=True)
            self._metrics: IO[str] = self.metrics_path.open("w", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(
                f"out={path}: the run folder cannot be written ({error.strerror}); name another folder with --out"
            ) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Closing retries the failed write and fails again; the first error is the one to report.
        with suppress(OSError):
            self._metrics.close()

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot_path(self) -> Path:
        return self.path / "plot.png"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.png"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Appends one line and flushes it, so that the lines up to a crash or a kill can be read."""
        with naming_write_errors(self.metrics_path):
            self._metrics.write(json.dumps(values, allow_nan=False) + "\n")
            self._metrics.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_path, summary)

    def write_report(self, html: str) -> None:
        with naming_write_errors(self.report_path):
            self.report_path.write_text(html, encoding="utf-8")


def check_writable(path: str | None, argument: str) -> None:
    """Fails now if a file that is written at the end cannot be; leaves no new file."""
    if path is None:
        return
    is_new = not os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
        if is_new:
            os.unlink(path)
    except OSError as error:
        raise ArgumentError(
            f"{argument}={path}: the file cannot be written ({error.strerror}); name a file in an existing folder"
        ) from error


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    with naming_write_errors(path):
        Path(path).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def naming_write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns OSError, such as a full disk, into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise SuperOffloadError(
            f"{path}: cannot be written ({error.strerror}); free some space, or choose another place with --out"
        ) from error
