"""Frameworks around the optimizer: DDP, FSDP2, Transformers, trainers, DeepSpeed."""
