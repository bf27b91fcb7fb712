"""Drafts of what a model will say next, and which of them it said."""
