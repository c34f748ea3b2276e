"""Measures what needs a checkout: python -m benchmarks.gpu_suite, python -m benchmarks.gh200, and scripts."""
