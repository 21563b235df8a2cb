"""Private names of PyTorch, one module for each subject."""
