"""Benchmarks: configurations compared by time, memory and similarity of their videos."""
