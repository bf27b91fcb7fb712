"""What guesses of a layout's rows would have to be worth, before a job has shown what they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bbquic.plan.cluster import Cluster, JobShape, Layout, ModelSizes
from bbquic.plan.predict import steady_step
from bbquic.plan.speculation import PLAIN, TREE_TOKENS, Trees, pays

HALVINGS = 30
COUNTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class WouldPay:
    """So many guesses a row pay where a pass commits more than `committed` tokens of a row on average; None:
    they would not if all were right."""

    guesses: int
    committed: float | None


def would_pay(
    cluster: Cluster, model: ModelSizes, job: JobShape, layout: Layout, most: int
) -> tuple[WouldPay, ...]:
    """For numbers of guesses up to `most`: where E[a] / step_spec is 1 / step_auto (architecture §4), both as
    `predict` has them, with a drafter that takes no time and no pruning."""
    rows = layout.batch / layout.micro_batches
    counts = [count for count in COUNTS if count <= most and rows * count <= TREE_TOKENS]
    plain = steady_step(cluster, model, job, layout, PLAIN)

    def is_worth(guesses: int, committed: float) -> bool:
        trees = Trees(guesses, guesses, committed)
        return pays(committed, steady_step(cluster, model, job, layout, trees), plain)

    found = []
    for guesses in counts:
        low, high = 1.0, 1.0 + guesses
        if not is_worth(guesses, high):
            found.append(WouldPay(guesses, None))
            continue
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if is_worth(guesses, middle) else (middle, high)
        found.append(WouldPay(guesses, high))
    return tuple(found)


def in_words(found: tuple[WouldPay, ...]) -> str | None:
    """Of all numbers of guesses, in a line; None: there are none."""
    if not found:
        return None
    worth = [one for one in found if one.committed is not None]
    if not worth:
        return "guessing ahead would not pay if every guess were right"
    figures = ", ".join(f"{one.committed:.2f} with {one.guesses}" for one in worth)
    return f"guessing ahead pays above so many tokens a pass, by guesses: {figures}"
