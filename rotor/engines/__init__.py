"""Engines: ways to run the training steps of a module within a limit."""
