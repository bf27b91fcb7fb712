"""Measurements: what each figure means is in METHODOLOGY.md."""
