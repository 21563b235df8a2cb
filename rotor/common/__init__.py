"""What all folders share: trees of tensors, ranks, caches, progress, state of modules."""
