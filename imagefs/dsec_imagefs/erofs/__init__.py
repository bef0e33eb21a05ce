"""EROFS images in Python: on-disk structures, a pure layout planner, a streaming writer and a small reader."""
