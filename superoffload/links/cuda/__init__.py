"""These modules serve an accelerator: its kernels and its link. They are imported only where there is one."""
