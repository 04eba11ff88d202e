"""Benchmarks of speed and fidelity: `python -m benchmarks`, or `make bench`."""
