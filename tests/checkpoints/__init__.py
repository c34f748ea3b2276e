"""superoffload.checkpoints: folders on disk."""
