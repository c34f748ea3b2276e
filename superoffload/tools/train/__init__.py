"""Trains a small model with `superoffload.AdamW`, for `superoffload train` and `verify`."""
