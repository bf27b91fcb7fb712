from __future__ import annotations

from hypothesis import settings

# Machines that run tests are slow at times; speed is measured in bench/, never asserted here.
settings.register_profile("bbquic", deadline=None)
settings.load_profile("bbquic")
