"""Plans for `superoffload plan` whether a model fits, what binds, how long a step takes, and which settings to use."""
