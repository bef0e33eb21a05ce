"""The dsec command: one file a noun."""
