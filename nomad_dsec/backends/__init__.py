"""Kinds of sandboxes behind one protocol (base)."""
