"""Tests whether several ranks converge as one process does, as a command and for the tests."""
