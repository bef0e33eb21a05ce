"""dsec-init (C), its frame protocol, and the channel to it."""
