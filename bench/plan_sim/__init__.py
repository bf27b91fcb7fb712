"""The simulated part of `bench.planner`: random clusters, the planner beside the others, how fast it is."""
