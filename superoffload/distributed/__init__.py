"""One verdict over all ranks, and checks that they have not diverged. Knows of tensors and ranks, not of modules."""
