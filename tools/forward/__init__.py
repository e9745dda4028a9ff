"""Measure single forward passes of a transformer and single decodes: time, memory, error against float32."""
