"""Engines whose state takes fewer bytes."""

from __future__ import annotations

from typing import Any

from tests.support.deepspeed.scenarios import Scenario
from tests.support.deepspeed.training import OURS

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"master_dtype": "split"},
    "bf16": {"state_dtype": "bf16"},
    "bf16+split": {"state_dtype": "bf16", "master_dtype": "split"},
    "8bit": {"state_dtype": "8bit"},
    "8bit+split": {"state_dtype": "8bit", "master_dtype": "split"},
}


def engine_with(scenario: Scenario, form: dict[str, Any], **options: Any) -> Any:
    return scenario.engine(OURS, {**form, **options})
