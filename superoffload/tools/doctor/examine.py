"""Runs all examinations in reading order and presents them as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from superoffload.host.processors import allowed_cpus as real_cpus
from superoffload.host.system import System
from superoffload.tools.doctor.bandwidth import examine_bandwidth
from superoffload.tools.doctor.cpu import examine_cpu, examine_instruction_sets
from superoffload.tools.doctor.findings import PROBLEM, WARNING, Examination, Finding
from superoffload.tools.doctor.gpu import Accelerators, TorchAccelerators, examine_gpu
from superoffload.tools.doctor.host_memory import examine_memory, examine_numa
from superoffload.tools.doctor.self_test import examine_undo
from superoffload.tools.doctor.software import examine_software
from superoffload.tools.doctor.superchip import examine_superchip
from superoffload.tools.doctor.threads import examine_threads

_WIDTH = 116
_MARKS = {"ok": "ok     ", WARNING: "WARNING", PROBLEM: "PROBLEM"}


@dataclass(frozen=True)
class Diagnosis:
    examinations: Sequence[Examination]

    @property
    def findings(self) -> list[Finding]:
        return [finding for examination in self.examinations for finding in examination.findings]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    @property
    def passed(self) -> bool:
        return self.count(PROBLEM) == 0

    def as_json(self) -> dict[str, Any]:
        return {
            "command": "doctor",
            "passed": self.passed,
            "warnings": self.count(WARNING),
            "problems": self.count(PROBLEM),
            "machine": {examination.topic: examination.facts for examination in self.examinations},
            "findings": [finding.as_json() for finding in self.findings],
        }

    def text(self) -> str:
        lines: list[str] = []
        for examination in self.examinations:
            lines.append(examination.topic)
            for finding in examination.findings:
                lines += _wrapped(f"  {_MARKS[finding.level]}  ", finding.text)
                if finding.remedy:
                    lines += _wrapped("           -> ", finding.remedy)
        lines.append("")
        lines.append(self._conclusion())
        return "\n".join(lines)

    def _conclusion(self) -> str:
        problems, warnings = self.count(PROBLEM), self.count(WARNING)
        if problems:
            return f"not fit to train: {_counted('problem', problems)}, {_counted('warning', warnings)}"
        if warnings:
            return f"fit to train, {_counted('warning', warnings)}"
        return "fit to train, nothing to remark"


def _counted(word: str, count: int) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _wrapped(prefix: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix), break_on_hyphens=False
    )


def diagnose(system: System, accelerators: Accelerators | None = None, measure_bandwidth: bool = True) -> Diagnosis:
    """Examines `system` (this machine by default); bandwidth and self-test always run on the real processors."""
    memory = examine_memory(system)
    superchip = examine_superchip(system)
    processors = [examine_cpu(system), examine_threads(system), examine_instruction_sets()]
    examinations = [*processors, memory, examine_numa(system)]
    if measure_bandwidth:
        usable = memory.facts["usable_bytes"]
        examinations.append(examine_bandwidth(system, real_cpus(), usable, superchip.facts["grace"]))
    examinations += [
        superchip,
        examine_gpu(system, TorchAccelerators() if accelerators is None else accelerators),
        examine_software(),
        examine_undo(),
    ]
    return Diagnosis(examinations)
