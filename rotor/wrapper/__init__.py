"""Wrapper of a model that trains within a limit."""
