"""Measures whole training steps on one GPU: superoffload, everything on the GPU, and other CPU-offloaded optimizers.

    python -m benchmarks.gpu_suite --out runs/gpu
    python -m benchmarks.gpu_suite --device cpu --toy --out runs/gpu-toy     # the same code paths, nothing to learn

README.md in this folder says what is measured and how.
"""
