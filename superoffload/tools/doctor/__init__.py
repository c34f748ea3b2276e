"""`superoffload doctor`: what this machine and this installation can do, what is in the way, and what to do."""
