"""Checkpoints on disk: whole or not at all, checked when read, for any number of ranks. docs/checkpoints.md."""

from superoffload.checkpoints.exporting import export_weights
from superoffload.checkpoints.folder import latest
from superoffload.checkpoints.loading import load
from superoffload.checkpoints.saving import Saving, save, save_in_background

__all__ = ["Saving", "export_weights", "latest", "load", "save", "save_in_background"]
