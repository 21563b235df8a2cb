"""What a plan does, for people to read."""
