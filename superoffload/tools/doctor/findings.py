"""Holds what the doctor says: a level, a sentence, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """Holds one remark of the doctor; `remedy` is empty only if nothing needs to be done."""

    level: str
    topic: str
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Examination:
    """Collects facts by name, and findings in reading order, about one part of the machine."""

    topic: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def ok(self, text: str) -> None:
        self.findings.append(Finding(OK, self.topic, text))

    def warn(self, text: str, remedy: str) -> None:
        self.findings.append(Finding(WARNING, self.topic, text, remedy))

    def problem(self, text: str, remedy: str) -> None:
        self.findings.append(Finding(PROBLEM, self.topic, text, remedy))
