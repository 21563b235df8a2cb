"""Shared helpers of all folders: trees of tensors, ranks, caches, progress, state of modules."""
