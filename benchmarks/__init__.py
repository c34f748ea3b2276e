"""Measures what needs a checkout: python -m benchmarks.adam, python -m benchmarks.gpu_suite and others."""
