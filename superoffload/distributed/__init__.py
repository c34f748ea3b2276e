"""Ranks reach one verdict together and check that they have not diverged."""
