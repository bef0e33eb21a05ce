"""libdsec: isolated, stateful sandboxes for RL training jobs."""
