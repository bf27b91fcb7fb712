"""The scheduler against stages that check every row, over random jobs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.errors import RecordError, RemoteProtocolError
from bbquic.kv.ranges import CELL_ALIGNMENT, SlotRange
from bbquic.model.sampling import Sampling
from bbquic.runtime.ledger import Ledger
from bbquic.runtime.protocol import PackHeader, Row
from bbquic.runtime.ranges import aligned, cut_range, equal_shares
from bbquic.runtime.request import Completion, Request
from bbquic.runtime.scheduler import Pack, Scheduler, SchedulerOptions
from bbquic.runtime.sequence import Sequence

END = 0
JOB = "0" * 16


class Letters:
    """A text stream in which every token is one letter."""

    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def finish(self) -> str:
        return ""


def make_sequence(line: int, prompt: int, max_tokens: int, stop: tuple[str, ...] = ()) -> Sequence:
    tokens = tuple(1 + (line + place) % 500 for place in range(prompt))
    request = Request(line, tokens, max_tokens, Sampling(), stop)
    return Sequence(request, ends=frozenset({END}), text=Letters())


def header(pack: Pack) -> PackHeader:
    where = pack.range
    return PackHeader(
        JOB, 0, pack.micro_batch, pack.step, (where.offset, where.slots, where.capacity), pack.rows
    )


class Stages:
    """What stages do, without tensors: keep each slot's tokens, and answer with a hash of all of them.

    An answer is right only if every token of the sequence, and none of another, is in its slot.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self.ledger: Ledger[Pack] = Ledger(cells=options.cells, micro_batches=options.micro_batches)
        self.slots: dict[tuple[int, int], list[int]] = {}

    def compute(self, pack: Pack) -> list[int]:
        admitted = self.ledger.admit(header(pack), pack)
        assert [one for _, one in admitted] == [pack]
        place, answers = 0, []
        for row in pack.rows:
            held = self.slots.setdefault((pack.micro_batch, row.slot), [])
            del held[row.first :]
            assert len(held) == row.first
            held.extend(pack.tokens[place : place + row.count])
            place += row.count
            if row.wants_token:
                answers.append(next_token(tuple(held)))
        assert place == len(pack.tokens)
        return answers


def next_token(held: tuple[int, ...]) -> int:
    """A deterministic answer that depends on all tokens so far; END for about one in twenty."""
    mixed = hash(held) % 1000
    return END if mixed < 50 else mixed


def alone(line: int, prompt: int, max_tokens: int) -> list[int]:
    """What a sequence answers when nobody else is there."""
    held = list(make_sequence(line, prompt, max_tokens).request.tokens)
    answer: list[int] = []
    while len(answer) < max_tokens:
        token = next_token(tuple(held))
        answer.append(token)
        held.append(token)
        if token == END:
            break
    return answer


@settings(max_examples=150)
@given(
    data=st.data(),
    jobs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=30),
    micro_batches=st.integers(1, 4),
    extra_slots=st.integers(0, 8),
    cells=st.integers(7, 40),
    prefill=st.integers(1, 64),
    look_ahead=st.integers(1, 12),
)
def test_every_sequence_is_answered_once_as_if_it_were_alone(
    data: st.DataObject,
    jobs: list[tuple[int, int]],
    micro_batches: int,
    extra_slots: int,
    cells: int,
    prefill: int,
    look_ahead: int,
) -> None:
    options = SchedulerOptions(
        micro_batches=micro_batches,
        slots=micro_batches + extra_slots,
        cells=cells * CELL_ALIGNMENT,
        prefill_tokens=prefill,
        look_ahead=look_ahead,
    )
    scheduler, stages = Scheduler(options), Stages(options)
    offered = 0
    flying: dict[int, Pack] = {}
    done: list[Completion] = []
    for _ in range(20_000):
        if scheduler.is_done:
            break
        if offered < len(jobs) and scheduler.room and (not flying or data.draw(st.booleans())):
            scheduler.offer(make_sequence(offered, *jobs[offered]))
            offered += 1
            if offered == len(jobs):
                scheduler.close()
        for micro_batch in range(micro_batches):
            if micro_batch not in flying and (pack := scheduler.next_pack(micro_batch)) is not None:
                flying[micro_batch] = pack
                assert pack.range.stop <= options.cells
        others = [one.range for one in flying.values()]
        assert not any(a.overlaps(b) for i, a in enumerate(others) for b in others[:i])
        assert scheduler.live <= options.slots
        if flying:
            back = data.draw(st.sampled_from(sorted(flying)))
            pack = flying.pop(back)
            tokens = stages.compute(pack)
            completions = scheduler.take_tokens(back, pack.step, tokens)
            assert completions is not None
            done.extend(completions)
            assert scheduler.take_tokens(back, pack.step, tokens) is None, "a repeat is no second answer"
    assert scheduler.is_done
    assert Counter(one.line for one in done) == Counter(range(len(jobs)))
    for one in done:
        expected = alone(one.line, *jobs[one.line])
        assert one.generated == len(expected)
        assert list(one.tokens) == [token for token in expected if token != END]
        assert one.finish_reason == ("stop" if expected[-1] == END else "length")


def test_a_sequence_larger_than_the_arena_is_refused_by_name() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=2, slots=4, cells=64))
    with pytest.raises(RecordError) as refused:
        scheduler.offer(make_sequence(1, prompt=60, max_tokens=5))
    assert refused.value.code == "does_not_fit"
    scheduler.offer(make_sequence(2, prompt=60, max_tokens=4))


def test_few_sequences_are_spread_over_all_micro_batches() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=4, slots=32, cells=32 * 64))
    for line in range(8):
        scheduler.offer(make_sequence(line, prompt=4, max_tokens=4))
    scheduler.close()
    packs = [scheduler.next_pack(micro_batch) for micro_batch in range(4)]
    assert [len(pack.rows) for pack in packs if pack is not None] == [2, 2, 2, 2]


def test_a_prompt_is_read_in_chunks_beside_decode_rows() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=1, slots=2, cells=2 * 64, prefill_tokens=4))
    scheduler.offer(make_sequence(0, prompt=3, max_tokens=20))
    first = scheduler.next_pack(0)
    assert first is not None
    scheduler.take_tokens(0, first.step, [7])
    scheduler.offer(make_sequence(1, prompt=10, max_tokens=9))
    second = scheduler.next_pack(0)
    assert second is not None
    assert [(row.first, row.count, row.wants_token) for row in second.rows] == [(3, 1, True), (0, 4, False)]
    assert second.prompt_tokens == 4


def test_tokens_for_a_step_that_was_never_sent_are_an_error() -> None:
    scheduler = Scheduler(SchedulerOptions(micro_batches=1, slots=1, cells=64))
    scheduler.offer(make_sequence(0, prompt=3, max_tokens=9))
    pack = scheduler.next_pack(0)
    assert pack is not None
    for micro_batch, step, tokens in ((0, 2, [1]), (0, 1, [1, 2]), (0, 1, []), (1, 1, [1])):
        with pytest.raises(ValueError, match=r"micro-batch|tokens"):
            scheduler.take_tokens(micro_batch, step, tokens)
    assert scheduler.take_tokens(0, 1, [5]) == []


@given(
    share=st.integers(0, 100).map(lambda n: n * CELL_ALIGNMENT),
    slots=st.integers(1, 20),
    needs=st.lists(st.integers(1, 600), max_size=30),
)
def test_a_range_holds_the_oldest_record_and_stays_in_its_share(
    share: int, slots: int, needs: list[int]
) -> None:
    where = cut_range(32, share, slots, needs)
    if not needs or aligned(needs[0]) > share:
        assert where is None
        return
    assert where is not None
    assert where.capacity >= needs[0]
    assert 1 <= where.slots <= slots
    assert where.offset == 32
    assert where.stop <= 32 + share


@given(cells=st.integers(1, 10_000), micro_batches=st.integers(1, 9))
def test_shares_do_not_overlap(cells: int, micro_batches: int) -> None:
    shares = equal_shares(cells, micro_batches)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(shares))
    assert shares[-1][0] + shares[-1][1] <= cells


def pack_of(step: int, rows: tuple[Row, ...], where: tuple[int, int, int] = (0, 2, 16)) -> PackHeader:
    return PackHeader(JOB, 0, 0, step, where, rows)


def row(slot: int = 0, generation: int = 1, first: int = 0, count: int = 1) -> Row:
    return Row(slot, generation, first, count, True, None)


@given(order=st.permutations(range(8)), repeats=st.lists(st.integers(0, 7), max_size=8))
def test_packs_that_overtook_one_another_are_applied_in_step_order_and_once(
    order: list[int], repeats: list[int]
) -> None:
    ledger: Ledger[int] = Ledger(cells=64, micro_batches=1)
    applied: list[int] = []
    for step in [*order, *repeats]:
        pack = pack_of(step + 1, (row(first=step),))
        applied += [load for _, load in ledger.admit(pack, step)]
    assert applied == list(range(8))
    assert ledger.held == 0


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(pack_of(2, (row(first=5),)), id="a gap"),
        pytest.param(pack_of(2, (row(first=0),)), id="a step back"),
        pytest.param(pack_of(2, (row(generation=0, first=1),)), id="an old generation"),
        pytest.param(pack_of(2, (row(generation=2, first=1),)), id="a new generation not at its start"),
        pytest.param(pack_of(2, (row(first=1, count=16),)), id="beyond the slot"),
        pytest.param(pack_of(2, (row(slot=2),)), id="beyond the range"),
        pytest.param(pack_of(2, (row(first=1), row(first=1))), id="a slot twice"),
        pytest.param(pack_of(2, (row(first=1),), (32, 3, 16)), id="a range beyond the arena"),
        pytest.param(pack_of(2, (row(first=1),), (0, 1, 32)), id="a new range under an old sequence"),
        pytest.param(pack_of(40, (row(first=1),)), id="far ahead"),
        pytest.param(PackHeader(JOB, 0, 3, 1, (0, 1, 16), (row(),)), id="no such micro-batch"),
    ],
)
def test_a_pack_that_contradicts_what_is_stored_is_refused(bad: PackHeader) -> None:
    ledger: Ledger[None] = Ledger(cells=64, micro_batches=2)
    ledger.admit(pack_of(1, (row(),)), None)
    with pytest.raises(RemoteProtocolError, match="micro-batch"):
        ledger.admit(bad, None)
    assert ledger.admit(pack_of(2, (row(first=1),)), None), "the honest one still goes on"


def test_a_range_taken_over_by_another_micro_batch_is_forgotten() -> None:
    ledger: Ledger[None] = Ledger(cells=64, micro_batches=2)
    ledger.admit(pack_of(1, (row(),)), None)
    other = PackHeader(JOB, 0, 1, 1, (16, 1, 32), (row(generation=9),))
    assert ledger.admit(other, None)
    with pytest.raises(RemoteProtocolError, match="holds 0 tokens"):
        ledger.admit(pack_of(2, (row(first=1),)), None)


def test_a_stop_string_ends_the_answer_before_it() -> None:
    sequence = make_sequence(0, prompt=1, max_tokens=9, stop=("cd", "zz"))
    assert [sequence.push(token) for token in (26, 27, 28, 29)] == [None, None, None, "stop"]
    assert sequence.completion().text == "ab"
    assert sequence.completion().generated == 4


def test_a_range_of_nothing_cannot_be_made() -> None:
    for numbers in ((-1, 1, 1), (0, 0, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match="slot range"):
            SlotRange(*numbers)
