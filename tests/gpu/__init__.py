"""Tests that need a CUDA device; most run on the CPU too, so that what they ask for is tried everywhere."""
