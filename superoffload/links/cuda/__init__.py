"""What only an accelerator needs: kernels and the link. Nothing here is imported without one."""
