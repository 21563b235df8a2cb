"""The largest batch that fits."""
