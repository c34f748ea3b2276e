"""Adapters to host frameworks. No optimizer logic: they translate a framework's events into calls of the core."""
