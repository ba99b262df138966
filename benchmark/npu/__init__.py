"""Benchmark on one card."""
