"""Graph engine: a captured step under a program of operations."""
