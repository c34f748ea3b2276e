"""Runs `superoffload report`: several runs of `superoffload train` in one page; exits with 0 if it could read all."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from superoffload.host.untrusted import printable
from superoffload.tools.cli.options import add_option


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="compare runs in one page",
        description="Compare loss, throughput, overlap, memory, settings and final bits of run folders that\n"
        "superoffload train has written, in one HTML page that needs no network. A run that did not end\n"
        "is shown as far as it came. Exits with 0 if all runs could be read, with 1 if one is damaged.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders (--out of superoffload train)")
    group = parser.add_argument_group("output")
    add_option(group, "--out", metavar="PATH", default="comparison.html", help="the page")
    group.add_argument("--json", metavar="PATH", help="write the figures to this file too")
    return parser


def run(args: argparse.Namespace) -> int:
    from superoffload.tools.report.comparison import comparison_page, different_settings, figures
    from superoffload.tools.report.comparison_plot import plot_comparison
    from superoffload.tools.report.plots import PLOT_HINT, matplotlib_installed
    from superoffload.tools.report.recorded_runs import load_runs
    from superoffload.tools.report.run_folder import check_writable, naming_write_errors, write_json

    runs = load_runs(args.runs)
    check_writable(args.out, "out")
    check_writable(args.json, "json")
    with tempfile.TemporaryDirectory() as folder:
        plot = None
        if matplotlib_installed():
            plot = Path(folder) / "comparison.png"
            plot_comparison(runs, plot)
        page = comparison_page(runs, plot, PLOT_HINT)
    with naming_write_errors(args.out):
        Path(args.out).write_text(page, encoding="utf-8")
    for values in map(figures, runs):
        held_out = values["held_out_loss_after"]
        print(
            f"{values['name']}: {values['steps']} steps, {values['tokens_per_second']:,.0f} tokens/s, "
            f"{values['exposed_share']:.1%} of the step exposed"
            + (f", held-out loss {held_out:.3f}" if held_out is not None else "")
            + ("" if values["ended"] else "; did not end")
        )
    print(f"report: {printable(args.out)}")
    if args.json:
        write_json(
            args.json,
            {
                "command": "report",
                "passed": True,
                "runs": [figures(run) for run in runs],
                "different_settings": different_settings(runs),
            },
        )
    return 0
