"""Trains a small language model on bytes of text, for benchmarks and for the convergence of ranks."""
