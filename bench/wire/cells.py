"""Messages over emulated links: the cells of `python -m bench.transport` that need a network."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.common import median, spread
from bench.wan import Link, Wan, mesh
from bench.wire.pair import Pair
from bench.wire.probes import probe_all

BURST, SMALL_BURST, BULK = 400_000, 40_000, 20_000_000  # bytes
SILENCE_S = 0.1
WARM_UP = 3  # messages of each stack that are not counted: the connection's first ones


@dataclass
class Wire:
    """What the cells have measured: ratios by the names that bars have, and spreads for the results file."""

    messages: int = 20  # counted messages a stack and cell
    bulks: int = 3
    measured: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, values: Sequence[float]) -> None:
        self.details[name] = spread(values)
        shown = ", ".join(f"{key} {value:.3f}" for key, value in self.details[name].items())
        print(f"{name}: {shown}", flush=True)


@contextmanager
def linked(link: Link, *stacks: str) -> Iterator[tuple[Wan, dict[str, Pair]]]:
    """A link between two hosts, and a connected pair of each stack on it."""
    with ExitStack() as stack:
        wan = stack.enter_context(Wan(mesh("a", "b", link=link), moderation_us=moderation(link)))
        pairs = {name: stack.enter_context(Pair(wan, name)) for name in stacks}
        for pair in pairs.values():
            pair.connect()
        yield wan, pairs


def moderation(link: Link, links: int = 1) -> float:
    """How long the emulator may hold packets to spare the machine, in µs, where `links` like this are in use.

    Above 200 Mbit/s it would otherwise take most of a core while a burst lasts, and a sender and a receiver
    share two cores with it: what is measured would be the machine. A network card's moderation is as long.
    """
    return 0.0 if links * (link.rate_mbps or 0.0) < 200 else 100.0


def ideal(size: int, link: Link) -> float:
    """Seconds a message takes at least: its bytes at the rate, and the delay (half a round trip)."""
    assert link.rate_mbps is not None
    return size * 8 / (link.rate_mbps * 1e6) + link.delay_ms / 1e3


def interleaved(
    pairs: dict[str, Pair], size: int, count: int, silence_s: float = SILENCE_S
) -> dict[str, list[float]]:
    """One-way seconds of `count` messages of each stack, one after another, each after silence."""
    times: dict[str, list[float]] = {name: [] for name in pairs}
    for number in range(count + WARM_UP):
        for name, pair in pairs.items():
            time.sleep(silence_s)
            took = pair.send(size)
            if number >= WARM_UP:
                times[name].append(took)
    return times


def name_of(link: Link) -> str:
    """Rate and round trip, as bars call a cell: 125_50."""
    return f"{link.rate_mbps:.0f}_{2 * link.delay_ms:.0f}"


TUNED = (Link(rate_mbps=20, delay_ms=50), Link(rate_mbps=125, delay_ms=25), Link(rate_mbps=250, delay_ms=25))


def bursts(wire: Wire) -> None:
    """400 KB and 40 KB after 100 ms of silence, on every stack; and what rate ours saw."""
    for link in TUNED:
        cell = name_of(link)
        with linked(link, "ours", "stock", "tcp-bbr", "tcp-cubic") as (_, pairs):
            times = interleaved(pairs, BURST, wire.messages)
            best = ideal(BURST, link)
            for stack, values in times.items():
                wire.note(f"burst_400k_{cell}_{stack}_vs_ideal", [value / best for value in values])
            wire.measured[f"burst_400k_{cell}"] = median(times["ours"]) / best
            wire.measured[f"burst_400k_{cell}_p95"] = spread(times["ours"])["p95"] / best
            wire.measured[f"burst_400k_{cell}_vs_stock"] = median(times["ours"]) / median(times["stock"])
            wire.measured[f"rate_error_{cell}_400k"] = rate_error(pairs["ours"], link)
        with linked(link, "ours") as (_, pairs):
            small = interleaved(pairs, SMALL_BURST, wire.messages)["ours"]
            wire.note(
                f"burst_40k_{cell}_ours_vs_ideal", [value / ideal(SMALL_BURST, link) for value in small]
            )
            wire.measured[f"burst_40k_{cell}"] = median(small) / ideal(SMALL_BURST, link)
            wire.measured[f"rate_error_{cell}_40k"] = rate_error(pairs["ours"], link)


def rate_error(pair: Pair, link: Link) -> float:
    """How far the sender's estimate is off the link's rate, as a share of it; 1 where it has none."""
    assert link.rate_mbps is not None
    rate = pair.rate()
    return 1.0 if rate is None else abs(rate * 8 / (link.rate_mbps * 1e6) - 1)


def first_message(wire: Wire) -> None:
    """400 KB as the first thing a connection carries, with nothing remembered and with what the last knew."""
    link = TUNED[0]
    with linked(link, "ours") as (_, pairs):
        pair = pairs["ours"]
        times: dict[str, list[float]] = {"cold": [], "remembered": []}
        pair.connect(remember=True)
        pair.send_many(BURST, 4, SILENCE_S)
        for _ in range(max(2, wire.messages // 2)):
            for kind in times:
                pair.connect(remember=kind == "remembered")
                times[kind].append(pair.send(BURST) / ideal(BURST, link))
        for kind, values in times.items():
            wire.note(f"first_400k_{name_of(link)}_{kind}", values)
            wire.measured[f"first_400k_{name_of(link)}_{kind}"] = median(values)


def long_silence(wire: Wire) -> None:
    """400 KB after 1.5 s of silence."""
    link = TUNED[1]
    with linked(link, "ours", "tcp-cubic") as (_, pairs):
        times = interleaved(pairs, BURST, max(2, wire.messages // 2), silence_s=1.5)
        for stack, values in times.items():
            wire.note(f"silence_1500ms_{name_of(link)}_{stack}", [v / ideal(BURST, link) for v in values])
        wire.measured[f"silence_1500ms_{name_of(link)}"] = median(times["ours"]) / ideal(BURST, link)


def losses(wire: Wire) -> None:
    """400 KB where packets are lost at random, against the kernel's BBR on the same link."""
    for rate, delay, loss in ((20, 50, 0.01), (125, 25, 0.005)):
        link = Link(rate_mbps=rate, delay_ms=delay, loss=loss)
        cell = f"loss_{name_of(link)}"
        with linked(link, "ours", "tcp-bbr") as (_, pairs):
            times = interleaved(pairs, BURST, wire.messages)
            for stack, values in times.items():
                wire.note(f"{cell}_{stack}_vs_ideal", [value / ideal(BURST, link) for value in values])
            wire.measured[f"{cell}_vs_bbr"] = median(times["ours"]) / median(times["tcp-bbr"])


def bulk(wire: Wire) -> None:
    """20 MB from a cold connection: the share of the rate over the whole transfer."""
    links = {f"bulk_{rate}_50": Link(rate_mbps=rate, delay_ms=25) for rate in (20, 125, 250)}
    links["bulk_jitter_20_50"] = Link(rate_mbps=20, delay_ms=25, jitter_ms=5, jitter_hold_ms=20, loss=0.005)
    for cell, link in links.items():
        assert link.rate_mbps is not None
        with linked(link, "ours", "tcp-bbr") as (_, pairs):
            shares: dict[str, list[float]] = {name: [] for name in pairs}
            for _ in range(wire.bulks):
                for name, pair in pairs.items():
                    pair.connect()
                    shares[name].append(BULK * 8 / (link.rate_mbps * 1e6) / pair.send(BULK))
            for name, values in shares.items():
                wire.note(f"{cell}_{name}", values)
            wire.measured[cell] = median(shares["ours"])


def busy(wire: Wire) -> None:
    """400 KB while a thread of the sending process runs Python-heavy torch code, against the same without."""
    link = TUNED[1]
    with linked(link, "ours") as (_, pairs):
        pair = pairs["ours"]
        times: dict[str, list[float]] = {"idle": [], "busy": []}
        pair.send_many(BURST, WARM_UP, SILENCE_S)
        for _ in range(max(1, wire.messages // 5)):
            for kind, values in times.items():
                pair.keep_busy(kind == "busy")
                pair.send_many(BURST, 1, SILENCE_S)
                values += pair.send_many(BURST, 5, SILENCE_S)
        pair.keep_busy(False)
        for kind, values in times.items():
            wire.note(f"torch_thread_{name_of(link)}_{kind}", [v / ideal(BURST, link) for v in values])
        wire.measured[f"torch_thread_{name_of(link)}"] = median(times["busy"]) / median(times["idle"])


def rate_step(wire: Wire) -> None:
    """The rate falls from 125 to 20 Mbit/s: the estimate ten messages later. No message may be lost."""
    errors = []
    for _ in range(wire.bulks):
        with linked(TUNED[1], "ours") as (wan, pairs):
            pair = pairs["ours"]
            pair.send_many(BURST, 6, SILENCE_S)
            wan.set_both("a", "b", rate_mbps=20)
            pair.send_many(BURST, 10, SILENCE_S)  # fails where one does not arrive
            errors.append(rate_error(pair, Link(rate_mbps=20, delay_ms=25)))
    wire.note("rate_step_125_20_error", errors)
    wire.measured["rate_step_125_20_error"] = median(errors)


def untuned(wire: Wire) -> None:
    """Links that nothing was tuned on; whatever they give is reported."""
    links = {
        "untuned_40_80": Link(rate_mbps=40, delay_ms=40),
        "untuned_200_40_jitter_15": Link(rate_mbps=200, delay_ms=20, jitter_ms=15, jitter_hold_ms=20),
        "untuned_125_50_loss_bursts_of_5": Link(rate_mbps=125, delay_ms=25, loss=0.005, loss_burst=5),
        "untuned_125_50_reordered": Link(rate_mbps=125, delay_ms=25, reorder=0.01, reorder_ms=10),
    }
    for cell, link in links.items():
        with linked(link, "ours", "tcp-bbr") as (_, pairs):
            for stack, values in interleaved(pairs, BURST, max(2, wire.messages // 2)).items():
                wire.note(f"{cell}_{stack}_vs_ideal", [value / ideal(BURST, link) for value in values])


def shared(wire: Wire) -> None:
    """A bulk transfer of ours beside one of another sender on one bottleneck: our share of the two."""
    link = Link(rate_mbps=50, delay_ms=25)
    for other in ("tcp-cubic", "tcp-bbr", "ours"):
        shares = []
        for _ in range(wire.bulks):
            with ExitStack() as stack:
                wan = stack.enter_context(Wan(mesh("a", "b", link=link), moderation_us=0))
                pairs = [stack.enter_context(Pair(wan, name)) for name in ("ours", other)]
                random.shuffle(pairs)
                for pair in pairs:
                    pair.connect()
                sent = beside(pairs, seconds=8.0)
                ours = next(pair for pair in pairs if pair.stack == "ours")
                shares.append(sent[id(ours)] / sum(sent.values()))
        wire.note(f"share_of_50_beside_{other}", shares)
        wire.measured[f"share_of_50_beside_{other}"] = median(shares)


def beside(pairs: Sequence[Pair], seconds: float) -> dict[int, int]:
    """Let every pair send without pause for so long; bytes that arrived of each, by the pair's id()."""
    for pair in pairs:
        pair.flood(seconds)
    return {id(pair): pair.flooded() for pair in pairs}


def probes(wire: Wire) -> None:
    """All pairs of five hosts that have sent nothing yet."""
    found = probe_all()
    for name, value in found.items():
        print(f"{name}: {value:.3g}", flush=True)
    wire.measured |= found


CELLS = (bursts, first_message, long_silence, losses, bulk, busy, rate_step, untuned, shared, probes)
