"""A checkpoint on disk is whole or absent, is checked when it is read, and serves any number of ranks."""

from superoffload.checkpoints.folder import latest
from superoffload.checkpoints.loading import load
from superoffload.checkpoints.saving import Saving, export_weights, save, save_in_background

__all__ = ["Saving", "export_weights", "latest", "load", "save", "save_in_background"]
