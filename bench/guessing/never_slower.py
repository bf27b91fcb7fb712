"""Guessing by what pays, beside always and never, in simulated cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bbquic.plan.simulate_speculation import Played, chain, fixed_time, simulate_guessing
from bbquic.plan.speculator import LEVELS, Situation, Speculator
from bench.guessing.cells import RATES, ROUND_TRIPS, Place

ACCEPTANCES = (0.1, 0.4, 0.7, 0.9)
MICRO_BATCHES = (1, 4)
BATCHES = (4, 32)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Tokens/s with the controller, over those of the best fixed number of guesses and over none."""

    place: Place
    accepts: float
    micro_batches: int
    best: int
    of_best: float
    of_off: float

    def __str__(self) -> str:
        where = f"{self.place.rate_mbps:.0f} Mbit/s {self.place.rtt_ms:.0f} ms B={self.place.batch}"
        return (
            f"{where} M={self.micro_batches} right {self.accepts:.0%}: x{self.of_off:.2f} of off, "
            f"x{self.of_best:.3f} of the best, {self.best} guesses"
        )


def simulated(passes: int) -> Iterator[Simulated]:
    """Every cell, with so many passes of a micro-batch at its best."""
    for rtt_ms in ROUND_TRIPS:
        for rate_mbps in RATES:
            for batch in BATCHES:
                for count in MICRO_BATCHES:
                    for accepts in ACCEPTANCES:
                        yield one(Place(rate_mbps, rtt_ms, batch), accepts, count, passes)


def one(place: Place, accepts: float, count: int, passes: int) -> Simulated:
    """A cell. `passes` without guesses are as many tokens; with them, longer jobs."""
    chances = chain(accepts, LEVELS[-1])
    rows = max(1, place.batch // count)
    job = Played(place.measured, count, rows, 1, lambda _: chances)
    fixed = {guesses: fixed_time(job, guesses) for guesses in LEVELS}
    best = min(fixed, key=lambda guesses: fixed[guesses])
    longer = Played(place.measured, count, rows, passes * (1 + sum(chances[:best])), job.truth)
    situation = Situation(place.measured, count)
    took = simulate_guessing(longer, Speculator(lambda: situation), seed=1) / longer.tokens
    return Simulated(place, accepts, count, best, fixed[best] / took, fixed[0] / took)
