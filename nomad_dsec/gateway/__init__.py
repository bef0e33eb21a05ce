"""HTTP in: routes, keys, relay of streams. No decisions about where (placement) or how (node)."""
