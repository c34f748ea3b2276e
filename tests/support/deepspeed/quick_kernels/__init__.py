"""The folder that tests put on PYTHONPATH of programs that use DeepSpeed; Python imports `sitecustomize` from it."""
