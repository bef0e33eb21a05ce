"""Nomad task drivers in Python: shims that bring each verb to the node daemon's Unix socket."""
