"""What the coordinator notes of its loop: accounts, clocks, and times to first token."""

from __future__ import annotations

import pytest
from clock_helpers import Clock, timing

from bbquic.runtime.observer import LoopObserver, Passage
from bbquic.runtime.protocol import Move, PackHeader, PongHeader, Row, TokensHeader
from bbquic.units import Bytes, Seconds

JOB = "0" * 16
LANES = (0.001, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0)
NODE = Clock(500.0)


def pack(batch: int, step: int, *rows: Row, moves: tuple[Move, ...] = ()) -> PackHeader:
    return PackHeader(JOB, 0, batch, step, (0, 8, 64), rows, b"", moves)


def row(slot: int, generation: int, first: int, *, wants: bool = True) -> Row:
    return Row(slot, generation, first, 4, wants, None)


def tokens(batch: int, step: int, arrived: float, count: int = 1) -> TokensHeader:
    return TokensHeader(JOB, 0, batch, step, (7,) * count, (timing("a", NODE, arrived, LANES),))


def heard(observer: LoopObserver, now: float) -> None:
    ping = observer.ping(0, Seconds(now))
    clock = NODE.at(now + 0.01)
    observer.heard(0, PongHeader(ping.number, "idle", 0.0, 0, clock, clock), Seconds(now + 0.02))


def test_a_pack_that_came_around_is_accounted_for() -> None:
    observer = LoopObserver(["a"])
    heard(observer, 0.0)
    observer.launched(pack(0, 1, row(0, 1, 0)), Bytes(90), Seconds(1.0))
    observer.answered(tokens(0, 1, 1.02), Bytes(60), Seconds(1.101))
    mean = observer.sums.mean()
    assert mean is not None
    assert mean.measured == pytest.approx(0.101)
    assert mean.hops[0].flight == pytest.approx(0.02, abs=1e-3)
    assert mean.hops[1].flight == pytest.approx(0.03, abs=1e-3)
    assert (mean.hops[0].sent, mean.hops[1].sent) == (90, 60)
    assert mean.total == pytest.approx(0.101)


def test_the_time_to_first_token_runs_from_a_prompts_first_row_to_its_first_token() -> None:
    observer = LoopObserver(["a"])
    observer.launched(pack(0, 1, row(3, 1, 0, wants=False)), Bytes(9), Seconds(1.0))
    observer.launched(pack(0, 2, row(3, 1, 4)), Bytes(9), Seconds(2.0))
    observer.answered(tokens(0, 1, 1.1, 0), Bytes(9), Seconds(1.5))
    assert observer.first_tokens.count == 0
    observer.answered(tokens(0, 2, 2.1), Bytes(9), Seconds(4.0))
    assert observer.first_tokens.count == 1
    assert observer.first_tokens.at(0.5) == pytest.approx(3.0, rel=0.03)
    observer.launched(pack(0, 3, row(3, 1, 8)), Bytes(9), Seconds(4.0))
    observer.answered(tokens(0, 3, 4.1), Bytes(9), Seconds(9.0))
    assert observer.first_tokens.count == 1, "the second token is not a first one"


def test_a_prompt_that_is_moved_while_it_is_read_keeps_its_beginning() -> None:
    observer = LoopObserver(["a"])
    observer.launched(pack(0, 1, row(3, 1, 0, wants=False)), Bytes(9), Seconds(1.0))
    move = Move(micro_batch=0, slot=3, generation=1, step=1, target=0, target_generation=9, count=4)
    observer.launched(pack(1, 1, row(0, 9, 4), moves=(move,)), Bytes(9), Seconds(2.0))
    observer.answered(tokens(1, 1, 2.1), Bytes(9), Seconds(3.0))
    assert observer.first_tokens.at(0.5) == pytest.approx(2.0, rel=0.03)


def test_tokens_that_nobody_waits_for_or_with_too_few_timings_change_nothing() -> None:
    observer = LoopObserver(["a", "b"])
    observer.answered(tokens(0, 1, 1.0), Bytes(9), Seconds(2.0))
    observer.launched(pack(0, 1, row(0, 1, 0)), Bytes(9), Seconds(1.0))
    observer.answered(tokens(0, 1, 1.0), Bytes(9), Seconds(2.0))
    assert observer.sums.steps == 0


def test_what_never_comes_back_is_forgotten_in_the_end() -> None:
    observer = LoopObserver(["a"])
    for step in range(40_000):
        observer.launched(pack(0, step, row(step, 1, 0, wants=False)), Bytes(9), Seconds(step))
    assert len(observer._launches) <= 16_384
    assert len(observer._begun) <= 16_384


def test_a_recorder_gets_every_passage_with_the_clocks_of_its_moment() -> None:
    seen: list[tuple[Passage, bool]] = []

    class Notes:
        def record(self, passage: Passage, clocks: object) -> None:
            assert isinstance(clocks, tuple)
            seen.append((passage, clocks[0] is not None))

    observer = LoopObserver(["a"], Notes())
    for step in (1, 2):
        observer.launched(pack(0, step, row(0, 1, 4 * step)), Bytes(9), Seconds(step))
        observer.answered(tokens(0, step, step + 0.1), Bytes(9), Seconds(step + 0.3))
        heard(observer, step + 0.4)
    assert [(passage.step, passage.answers, known) for passage, known in seen] == [
        (1, 1, False),
        (2, 1, True),
    ]
    assert seen[0][0].launch.tokens == 4
