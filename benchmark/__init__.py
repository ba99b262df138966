"""Benchmarks of the tuned model; entry points are benchmark/npu/benchmark_qwen.py and its siblings."""
