"""Dynamic: memory that is decided while a step runs."""
