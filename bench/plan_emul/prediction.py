"""Predicted steps beside measured ones: unequal nodes, unequal links, few and many micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from bbquic.plan.cluster import COMMAND, JobShape, Layout
from bench.plan_emul.emulation import emulated
from bench.plan_emul.figures import Figures
from bench.plan_emul.predict import Predicted, layout_of, predict, shown
from bench.plan_emul.scene import HOME, Scene, joined, machine, model
from bench.stand_in.cell import CodecName

FURTHER = 1.15  # layouts that are predicted to differ by more have to be ranked right
JOB = JobShape(sequences=64, prompt=0, output=64, longest=64, slot=64)

Blocks = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SetUp:
    """What is run on a scene: batch, micro-batches, codec, and which of the scene's layouts."""

    batch: int
    micro_batches: int
    codec: CodecName
    splits: tuple[Blocks, ...]
    coordinator: str | None = None  # None: on the first stage's host

    def layouts(self) -> list[Layout]:
        return [layout_of(split, self.batch, self.micro_batches, self.coordinator) for split in self.splits]


@dataclass(frozen=True)
class Ran:
    """A layout that ran, beside its prediction; seconds a step."""

    scene: str
    set_up: SetUp
    predicted: Predicted
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted.step / self.measured - 1

    @property
    def tokens_per_second(self) -> float:
        return self.predicted.layout.batch / self.measured

    def __str__(self) -> str:
        p = self.predicted
        ways = ",".join(p.layout.ways)
        return (
            f"{self.scene}: {shown(p.layout)}; {self.set_up.codec} ({ways}): predicted {p.step * 1e3:.1f} ms "
            f"({p.limit}), measured {self.measured * 1e3:.1f}, {self.error:+.1%}"
        )


TWO = Scene(
    "two",
    model("two", 24, 4096),
    (machine("a", 1.5, embed_ms=1), machine("b", 3.0, head_ms=4)),
    {**joined(("a", "b", 50, 20)), ("b", "a"): joined(("b", "a", 20, 20))["b", "a"]},
    JOB,
)
THREE = Scene(
    "three",
    model("three", 30, 5120),
    (machine("a", 1.0), machine("b", 2.0, head_ms=3), machine("c", 1.5, head_ms=3)),
    joined(("a", "b", 100, 15), ("b", "c", 30, 40), ("a", "c", 60, 25)),
    JOB,
)
AFAR = Scene(
    "afar",
    model("afar", 24, 4096),
    (machine("a", 1.2), machine("b", 1.2), machine("c", 2.4)),
    joined(
        ("a", "b", 100, 10),
        ("b", "c", 40, 30),
        ("a", "c", 40, 30),
        (HOME, "a", 50, 60),
        (HOME, "b", 50, 50),
        (HOME, "c", 50, 70),
    ),
    JOB,
)
FOUR = Scene(
    "four",
    model("four", 32, 4096),
    (machine("a", 0.8), machine("b", 1.2), machine("c", 2.0), machine("d", 3.0)),
    joined(
        ("a", "b", 250, 5),
        ("a", "c", 125, 20),
        ("b", "c", 125, 20),
        ("a", "d", 40, 30),
        ("b", "d", 60, 80),
        ("c", "d", 20, 50),
    ),
    JOB,
)

TWO_EVEN: Blocks = (("a", 12), ("b", 12))
TWO_FAST: Blocks = (("a", 18), ("b", 6))
TWO_BACK: Blocks = (("b", 6), ("a", 18))
THREE_WIDE: Blocks = (("a", 15), ("b", 5), ("c", 10))
THREE_NEAR: Blocks = (("b", 8), ("a", 12), ("c", 10))
THREE_SKIP: Blocks = (("a", 18), ("c", 12))
AFAR_EVEN: Blocks = (("a", 8), ("b", 8), ("c", 8))
AFAR_NEAR: Blocks = (("a", 12), ("b", 12))
FOUR_EVEN: Blocks = (("a", 8), ("b", 8), ("c", 8), ("d", 8))
FOUR_FAST: Blocks = (("a", 14), ("b", 9), ("c", 6), ("d", 3))
FOUR_SKIP: Blocks = (("b", 10), ("a", 14), ("c", 8))

SET_UPS: tuple[tuple[Scene, tuple[SetUp, ...]], ...] = (
    (
        TWO,
        (
            SetUp(16, 1, "raw", (TWO_EVEN, TWO_FAST)),
            SetUp(32, 4, "auto", (TWO_EVEN, TWO_FAST)),
            SetUp(64, 2, "raw", (TWO_FAST, TWO_BACK)),
            SetUp(64, 8, "auto", (TWO_FAST, TWO_BACK)),
        ),
    ),
    (
        THREE,
        (
            SetUp(32, 1, "auto", (THREE_WIDE, THREE_SKIP)),
            SetUp(32, 4, "raw", (THREE_WIDE, THREE_SKIP)),
            SetUp(64, 8, "auto", (THREE_NEAR, THREE_SKIP)),
        ),
    ),
    (
        AFAR,
        (
            SetUp(16, 1, "raw", (AFAR_EVEN, AFAR_NEAR), COMMAND),
            SetUp(32, 8, "raw", (AFAR_EVEN, AFAR_NEAR), COMMAND),
            SetUp(32, 2, "auto", (AFAR_EVEN, AFAR_NEAR), COMMAND),
        ),
    ),
    (
        FOUR,
        (
            SetUp(32, 2, "raw", (FOUR_EVEN, FOUR_FAST)),
            SetUp(64, 8, "auto", (FOUR_EVEN, FOUR_SKIP)),
            SetUp(48, 4, "raw", (FOUR_FAST, FOUR_SKIP)),
        ),
    ),
)
QUICK = ((TWO, (SetUp(16, 1, "raw", (TWO_EVEN,)),)),)


def run_all(
    figures: Figures, set_ups: Sequence[tuple[Scene, Sequence[SetUp]]] = SET_UPS, counted: int = 8
) -> Iterator[Ran]:
    """Every layout of every set-up, once."""
    for scene, tried in set_ups:
        with emulated(scene, [layout for one in tried for layout in one.layouts()]) as emulation:
            for one in tried:
                for layout in one.layouts():
                    predicted = predict(scene, figures, layout, raw=one.codec == "raw")
                    measured = emulation.run(layout, one.codec, counted=counted)
                    yield Ran(scene.name, one, predicted, measured.step)


def ranked(ran: Sequence[Ran]) -> tuple[int, list[tuple[Ran, Ran]]]:
    """How many pairs on the same scene differ by enough, and those that are ranked wrong, by tokens/s."""
    pairs, wrong = 0, []
    for one, other in combinations(ran, 2):
        if one.scene != other.scene:
            continue
        low, high = sorted((one, other), key=lambda ran: ran.predicted.tokens_per_second)
        if high.predicted.tokens_per_second > FURTHER * low.predicted.tokens_per_second:
            pairs += 1
            if high.tokens_per_second <= low.tokens_per_second:
                wrong.append((low, high))
    return pairs, wrong
