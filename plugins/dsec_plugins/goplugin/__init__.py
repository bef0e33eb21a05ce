"""Serving a HashiCorp go-plugin (protocol 1, gRPC) from Python. Knows nothing of the host that loads it."""
