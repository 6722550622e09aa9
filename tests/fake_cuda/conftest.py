"""These files put a device in the place of PyTorch's own: each is for a process of its own, and none for examples."""

collect_ignore_glob = ["*.py"]
