"""Lossless compression of activations: frames, byte planes, shift tables. Knows no network and no model."""
