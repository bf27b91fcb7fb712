"""A tiny draft model out of some blocks of its target, trained on what the target says."""
