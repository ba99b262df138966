"""Benchmark over several cards."""
