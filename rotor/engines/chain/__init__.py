"""Chains: an ``nn.Sequential`` under an optimal schedule."""
