"""Containers: spec and plan (pure), launchers, the backend."""
