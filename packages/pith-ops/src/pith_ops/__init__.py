"""Single-device operators: a PyTorch reference each and, where it pays, a kernel or library."""
