"""Costs of operations: measured, looked at, estimated; whether they repeat."""
