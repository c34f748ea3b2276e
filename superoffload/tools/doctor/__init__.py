"""Examines for `superoffload doctor` what this machine and installation can do, what is in the way, and what to do."""
