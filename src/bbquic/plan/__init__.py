"""Planning: pure functions from measurements to layouts. No clock, socket or tensor in here."""
