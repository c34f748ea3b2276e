"""The folder that `superoffload run` puts on PYTHONPATH; Python imports `sitecustomize` from it when it starts."""
