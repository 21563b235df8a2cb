"""Meters of memory: exact meters of an allocator, and meters of a training step."""
