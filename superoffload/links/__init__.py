"""Links move gradients to host memory and parameters back: one for the CPU, one for CUDA devices."""
