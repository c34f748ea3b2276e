"""superoffload.AdamW and CPUAdamW in one process."""
