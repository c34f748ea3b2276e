"""A small, real training program on top of `superoffload.AdamW`: what `superoffload train` and `verify` run."""
