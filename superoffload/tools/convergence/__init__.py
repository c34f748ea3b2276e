"""Tests whether several ranks converge as one process does, for `superoffload verify --ranks` and the tests."""
