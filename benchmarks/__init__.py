"""Benchmarks: `make bench` (or `python -m benchmarks [topic ...]`) prints one table of ratios."""
