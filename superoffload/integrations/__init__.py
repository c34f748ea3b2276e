"""Adapters between host frameworks and the optimizer; no optimizer logic."""
