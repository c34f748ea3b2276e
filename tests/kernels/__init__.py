"""The kernels of csrc: bits, accuracy, undo and replay, and what they cost on Grace."""
