"""What tests under DeepSpeed share: ranks, scenarios, stock and upstream optimizers."""
