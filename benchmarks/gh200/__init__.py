"""Measures a Superchip for its owner: python -m benchmarks.gh200 --out runs/gh200. README.md says what it measures."""
