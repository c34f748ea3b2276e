"""Measures a user's machine for `superoffload bench`; benchmarks/ of a checkout has the rest."""
