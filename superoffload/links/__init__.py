"""Links move gradients to host memory and parameters back: one for parameters on the CPU, one for CUDA devices."""
