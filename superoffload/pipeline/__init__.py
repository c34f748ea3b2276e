"""The core in layers of one idea each: layout, waiting, delivering, settling; superoffload/core.py has the step."""
