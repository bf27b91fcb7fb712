"""Nodes that stand in for GPUs: they wait where a GPU computes, and send recorded activations."""
