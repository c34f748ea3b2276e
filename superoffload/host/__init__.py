"""What the machine and the process offer: processors, memory, signals, the environment, tensors as memory."""
