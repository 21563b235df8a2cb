"""Chain engine: an ``nn.Sequential`` under an optimal schedule."""
