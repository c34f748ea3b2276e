"""These modules know the machine and the process: processors, memory, signals, environment, bits of tensors."""
