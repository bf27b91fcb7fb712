"""How long a stand-in computes, and how a stage is told: by the plan's manifest, as of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bbquic.model.manifest import Manifest
from bbquic.units import Seconds

MODEL = "replay"
NO_TOKENIZER = "0" * 64  # a manifest wants a hash; here is nothing to hash

# The share of a decode step of 32 rows that does not depend on the rows: weights are read once for all of
# them. An assumption (decoding is bound by memory); nobody published it.
FIXED_SHARE = 0.85
FULL_ROWS = 32


@dataclass(frozen=True, slots=True)
class CostTable:
    """t(rows): seconds by rows of a pack, linear between the points and beyond the last two.

    Raises: ValueError unless there are two points or more, by rising rows, of times that do not fall.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ValueError("a cost table has two points or more")
        for (rows, seconds), (more, longer) in zip(self.points, self.points[1:], strict=False):
            if not (0 <= rows < more and 0 <= seconds <= longer):
                raise ValueError(f"a cost table rises, and {rows}: {seconds}, {more}: {longer} does not")

    @classmethod
    def of_step(cls, seconds: float, rows: int = FULL_ROWS) -> CostTable:
        """t(r) = t(rows) · (0.85 + 0.15 · r / rows), from the time of one step of `rows` rows."""
        return cls(((0, FIXED_SHARE * seconds), (rows, seconds)))

    def __call__(self, rows: int) -> Seconds:
        last = len(self.points) - 2
        place = next((i for i in range(last) if rows <= self.points[i + 1][0]), last)
        (low, began), (high, ended) = self.points[place], self.points[place + 1]
        return Seconds(began + (ended - began) * (rows - low) / (high - low))


@dataclass(frozen=True, slots=True)
class StandIn:
    """What one stage pretends to be. `most_rows` is the largest pack that will come.

    Where it is the last, it finds a guess right with the probability `accepts`, drawn from `seed`.
    """

    hidden: int
    cost: CostTable
    most_rows: int
    accepts: float = 0.0
    seed: int = 0

    def manifest(self) -> Manifest:
        """The manifest that carries it to a node."""
        config = {
            "hidden_size": self.hidden,
            "cost": self.cost.points,
            "most_rows": self.most_rows,
            "accepts": self.accepts,
            "seed": self.seed,
        }
        return Manifest(MODEL, {key: json.dumps(value) for key, value in config.items()}, NO_TOKENIZER, {})

    @classmethod
    def of_config(cls, config: Mapping[str, str]) -> StandIn:
        """Raises: KeyError, ValueError on a manifest that no stand-in made."""
        points: Sequence[Sequence[Any]] = json.loads(config["cost"])
        cost = CostTable(tuple((int(rows), float(seconds)) for rows, seconds in points))
        accepts, seed = float(config["accepts"]), int(config["seed"])
        return cls(int(config["hidden_size"]), cost, int(config["most_rows"]), accepts, seed)
