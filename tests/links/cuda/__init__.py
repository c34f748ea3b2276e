"""The CUDA link, over a fake driver and emulated kernels."""
