"""Shared by all folders: constants of the memory model, trees of tensors, calls, state, ranks."""
