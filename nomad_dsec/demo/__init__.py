"""`dsec demo`: groups of scripted agents repair a small repository in sandboxes while the node daemon is killed."""
