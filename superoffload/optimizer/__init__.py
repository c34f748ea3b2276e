"""AdamW owns these parts: parameters, arriving gradients, delivery, edits, state. adamw_parts.py assembles them."""
