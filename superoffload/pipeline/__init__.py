"""The core in layers of one idea each, from layout up to arriving; superoffload/core.py has the end of a step."""
