"""Nomad drivers: one generic servicer, one dataclass a driver for its configuration, entries of about twenty lines."""
