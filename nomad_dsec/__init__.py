"""nomad-dsec: elastic sandboxes for agentic RL, the node side and the cluster side."""
