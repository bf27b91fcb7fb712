"""How often a draft model's guesses are right that it gives some probability: learnt over a job. Pure."""

from __future__ import annotations

BINS = 10  # of probability
WEIGHT = 10.0  # guesses that count as right as often as the model says, before anything is known


class Calibration:
    """Corrects probabilities of guesses by how often the like were right, in proportion."""

    def __init__(self) -> None:
        self._said = [0.0] * BINS
        self._right = [0.0] * BINS

    def __call__(self, chance: float) -> float:
        place = _bin(chance)
        return min(1.0, chance * (self._right[place] + WEIGHT) / (self._said[place] + WEIGHT))

    def learn(self, chance: float, *, was_right: bool) -> None:
        """Of a guess behind a node that was right; `chance` is what the model said."""
        place = _bin(chance)
        self._said[place] += chance
        self._right[place] += was_right


def _bin(chance: float) -> int:
    return min(BINS - 1, int(chance * BINS))
