"""`import superoffload` alone reaches every public module, and loads none before it is used."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import superoffload
from tests.support.checkout import ROOT


def test_modules_are_there_without_an_import_of_their_own() -> None:
    script = (
        "import sys, superoffload\n"
        "assert not [m for m in sys.modules if m.startswith('superoffload.') and m != 'superoffload._version']\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "superoffload.integrations\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(superoffload.integrations.fsdp2.__name__)\n"
        "print(superoffload.checkpoints.save.__name__, superoffload.checkpoints.load.__name__)\n"
        "print(superoffload.metrics.Limits.__name__, superoffload.exporter.PrometheusExporter.__name__)\n"
        "print(superoffload.errors.ArgumentError.__name__, superoffload.timeline.span.__name__)\n"
        "print(superoffload.kernels.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = "save load Limits PrometheusExporter ArgumentError span superoffload.kernels"
    assert done.stdout.split() == ["superoffload.integrations.fsdp2", *expected.split()]


def test_the_name_that_others_give_8_bit_moments_leads_to_ours() -> None:
    with pytest.raises(AttributeError, match=r"AdamW8bit.*AdamW\(\.\.\., state_dtype='8bit'\)"):
        superoffload.__getattr__("AdamW8bit")


def test_every_module_of_the_reference_is_reachable() -> None:
    named = re.findall(r"^::: (superoffload\.\w+)", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    at_the_root = {"adamw", "cpu_adamw", "engine"}  # what is named of these is there
    public = {name.partition(".")[2] for name in named} - at_the_root
    assert public <= set(dir(superoffload)), "docs/api.md has modules that `import superoffload` does not reach"
