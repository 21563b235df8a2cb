"""Graphs of operations out of captured code: folded, rewritten, fused, lowered."""
