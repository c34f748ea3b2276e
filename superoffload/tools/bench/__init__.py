"""What `superoffload bench` measures of a user's machine, and how; benchmarks/ of a checkout has the rest."""
