"""The wrapper: a model that trains within a limit."""
