"""What ``superoffload.AdamW`` owns; parts.py puts it together."""
