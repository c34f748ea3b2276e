"""Where the checkout lies that the tests belong to."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
