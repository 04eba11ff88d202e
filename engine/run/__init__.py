"""Runs: prefill, decode, sampling, detokenization and the queue of requests."""
