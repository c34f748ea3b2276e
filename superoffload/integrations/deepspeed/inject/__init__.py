"""`superoffload run` puts this folder on PYTHONPATH; Python imports `sitecustomize` from it when it starts."""
