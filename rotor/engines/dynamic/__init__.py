"""Dynamic engine: memory that is managed while a step runs."""
