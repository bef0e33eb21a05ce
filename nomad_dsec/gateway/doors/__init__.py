"""Doors: HTTP APIs of other projects, translated to ours, so that their clients need only our URL."""
