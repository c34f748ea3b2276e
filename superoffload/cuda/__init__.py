"""What only an accelerator needs: kernels, the link, transfer policies. Nothing here is imported without one."""
