"""What ``superoffload.AdamW`` is made of, a layer per file; each layer builds on the one before it.

lifetime -> parameters -> gradients -> steps -> saved_state -> delivery -> ``superoffload.adamw.AdamW``
"""
