"""Meters of memory: exact ones of an allocator, and those of a training step."""
