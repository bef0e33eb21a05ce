"""Benchmarks: series as JSON with machine facts; no asserts on time. `python -m tests.bench.run [--quick] NAMES`."""
