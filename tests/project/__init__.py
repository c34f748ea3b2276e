"""The project itself: packaging, documentation, benchmarks, shape rules, the GPU suite."""
