"""What the owner of a Superchip runs: python -m benchmarks.gh200 --out runs/gh200. README.md says what it measures."""
