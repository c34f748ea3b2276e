"""The CUDA link: what moves gradients down and parameters up where the model is on a CUDA device (docs/pipeline.md)."""
