"""Questions of our own that were asked once: in the tree, not in the wheel."""
