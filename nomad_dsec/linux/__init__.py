"""Thin typed wrappers of the kernel; each names its man page."""
