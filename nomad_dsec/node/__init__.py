"""The node daemon: the only thing that starts a sandbox."""
