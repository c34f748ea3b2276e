"""`superoffload plan`: whether a model fits, what binds, how fast a step will be, and which settings to use."""
