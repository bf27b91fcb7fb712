"""What a stage lets through, holds and refuses."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_simulation import JOB

from bbquic.errors import RemoteProtocolError
from bbquic.kv.ranges import SlotCopy, SlotRange
from bbquic.kv.regions import SlotCompaction
from bbquic.kv.rows import Layout
from bbquic.runtime.ledger import Ledger
from bbquic.runtime.placement import PLAIN, CompactionPolicy, Placement
from bbquic.runtime.protocol import Move, PackHeader, Row, Tree


def pack_of(step: int, rows: tuple[Row, ...], where: tuple[int, ...] = (0, 2, 16)) -> PackHeader:
    return PackHeader(JOB, 0, 0, step, where, rows)


def row(slot: int = 0, generation: int = 1, first: int = 0, count: int = 1) -> Row:
    return Row(slot, generation, first, count, True, None)


@given(order=st.permutations(range(8)), repeats=st.lists(st.integers(0, 7), max_size=8))
def test_packs_that_overtook_one_another_are_applied_in_step_order_and_once(
    order: list[int], repeats: list[int]
) -> None:
    ledger: Ledger[int] = Ledger(tiers=(64,), micro_batches=1, depth=8)
    applied: list[int] = []
    for step in [*order, *repeats]:
        pack = pack_of(step + 1, (row(first=step),))
        applied += [due.load for due in ledger.admit(pack, step)]
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
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=16)
    ledger.admit(pack_of(1, (row(),)), None)
    with pytest.raises(RemoteProtocolError, match="micro-batch"):
        ledger.admit(bad, None)
    assert ledger.admit(pack_of(2, (row(first=1),)), None), "the honest one still goes on"


def test_a_slot_whose_cells_another_micro_batch_takes_is_forgotten_and_no_other() -> None:
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=16)
    ledger.admit(pack_of(1, (row(), row(slot=1))), None)
    other = PackHeader(JOB, 0, 1, 1, (16, 1, 32), (row(generation=9),))
    assert ledger.admit(other, None)
    with pytest.raises(RemoteProtocolError, match="slot 1 holds 0 tokens"):
        ledger.admit(pack_of(2, (row(slot=1, first=1),)), None)
    ledger = Ledger(tiers=(64,), micro_batches=2, depth=16)
    ledger.admit(pack_of(1, (row(), row(slot=1))), None)
    ledger.admit(other, None)
    assert ledger.admit(pack_of(2, (row(first=1),)), None)


def test_what_slots_hold_stays_when_a_range_grows_or_is_cut_at_its_end() -> None:
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=16)
    for step, slots in ((1, 2), (2, 4), (3, 1), (4, 2)):
        where = (0, slots, 16)
        assert ledger.admit(pack_of(step, (row(first=step - 1),), where), None)
    with pytest.raises(RemoteProtocolError, match="slot 0 holds 0 tokens"):
        ledger.admit(pack_of(5, (row(first=4),), (0, 2, 32)), None)


@pytest.mark.parametrize("order", permutations(range(2)))
def test_a_range_is_parted_without_a_copy_whichever_part_comes_first(order: tuple[int, ...]) -> None:
    ledger: Ledger[int] = Ledger(tiers=(64,), micro_batches=2, depth=16)
    ledger.admit(pack_of(1, (row(), row(slot=2, count=3)), (0, 4, 16)), 9)
    move = Move(0, 2, 1, 1, 0, 7, 3)
    upper = PackHeader(JOB, 0, 1, 1, (32, 2, 16), (row(generation=7, first=3),), moves=(move,))
    packs = [pack_of(2, (row(first=1),), (0, 2, 16)), upper]
    due = [one for index in order for one in ledger.admit(packs[index], index)]
    assert [(one.load, one.copies) for one in due] == [(index, ()) for index in order]
    back = Move(1, 0, 7, 1, 2, 8, 4)
    joined = PackHeader(JOB, 0, 0, 3, (0, 4, 16), (row(slot=2, generation=8, first=4),), moves=(back,))
    (one,) = ledger.admit(joined, 5)
    assert one.copies == ()
    with pytest.raises(RemoteProtocolError, match="holds 0 tokens"):
        ledger.admit(PackHeader(JOB, 0, 1, 2, (32, 2, 16), (row(generation=7, first=4),)), 5)


TIERS = (64, 48)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param((0, 2, 16), id="of one tier"),
        pytest.param((0, 2, 16, 64, 1, 112, 0), id="of three"),
        pytest.param((32, 3, 16, 64, 1), id="into the next tier"),
        pytest.param((0, 2, 16, 48, 1), id="from the tier before"),
        pytest.param((0, 2, 16, 80, 3), id="beyond the arena"),
        pytest.param((0, 0, 16, 113, 1), id="behind the arena"),
    ],
)
def test_a_range_whose_strips_are_not_within_their_tiers_is_refused(where: tuple[int, ...]) -> None:
    ledger: Ledger[None] = Ledger(tiers=TIERS, micro_batches=2, depth=16)
    with pytest.raises(RemoteProtocolError, match="is not within the arena"):
        ledger.admit(pack_of(1, (row(),), where), None)
    assert ledger.admit(pack_of(1, (row(),), (32, 2, 16, 80, 2)), None)


def test_a_row_is_in_a_slot_of_its_tier_or_refused() -> None:
    """Slots go round the tiers: with three places in one tier and one in the next there is no slot 3."""
    ledger: Ledger[None] = Ledger(tiers=TIERS, micro_batches=1, depth=16)
    where = (0, 3, 16, 64, 1)
    assert ledger.admit(pack_of(1, tuple(row(slot=slot) for slot in (0, 2, 4, 1)), where), None)
    with pytest.raises(RemoteProtocolError, match="slot 3 is not in"):
        ledger.admit(pack_of(2, (row(slot=3),), where), None)


def test_tiers_are_parted_without_a_copy_and_a_move_between_them_is_one() -> None:
    ledger: Ledger[None] = Ledger(tiers=TIERS, micro_batches=2, depth=16)
    ledger.admit(pack_of(1, (row(slot=2), row(slot=3), row()), (0, 2, 16, 64, 2)), None)
    renamed = [Move(0, slot, 1, 1, slot - 2, 7, 1) for slot in (2, 3)]
    rows = tuple(row(slot=slot, generation=7, first=1) for slot in (0, 1))
    upper = PackHeader(JOB, 0, 1, 1, (16, 1, 16, 80, 1), rows, moves=tuple(renamed))
    (due,) = ledger.admit(upper, None)
    assert due.copies == ()
    move = Move(1, 0, 7, 1, 5, 8, 2)
    moved = pack_of(2, (row(slot=5, generation=8, first=2), row(first=1)), (0, 1, 16, 64, 3))
    (due,) = ledger.admit(msgspec.structs.replace(moved, moves=(move,)), None)
    source, target = SlotRange.of(*upper.range), SlotRange.of(*moved.range)
    assert due.copies == (SlotCopy(source, 0, target, 5, 2),)
    assert (source.cells(0).start, target.cells(5).start) == (16, 96)
    with pytest.raises(RemoteProtocolError, match="slot 0 holds 0 tokens of generation 7"):
        ledger.admit(PackHeader(JOB, 0, 1, 2, upper.range, (row(generation=7, first=2),)), None)


FROM, TO = (0, 2, 16), (32, 2, 16)


def move(**changes: int) -> Move:
    """One token from slot 0 of micro-batch 1, where step 3 stored it, to slot 1 of micro-batch 0."""
    fields = {"micro_batch": 1, "slot": 0, "generation": 5, "step": 3, "target": 1, "target_generation": 9}
    return Move(**({**fields, "count": 3} | changes))  # type: ignore[arg-type]  # fields that are numbers


def moving(*moves: Move, first: int = 3, step: int = 1, where: tuple[int, int, int] = TO) -> PackHeader:
    rows = (Row(1, 9, first, 1, True, None),)
    return PackHeader(JOB, 0, 0, step, where, rows, moves=moves)


def source_step(step: int) -> PackHeader:
    return PackHeader(JOB, 0, 1, step, FROM, (Row(0, 5, step - 1, 1, True, None),))


@given(order=st.permutations(range(5)))
def test_a_move_is_made_once_its_source_is_whole_whatever_comes_first(order: list[int]) -> None:
    packs = [source_step(1), source_step(2), source_step(3), moving(move()), moving(first=4, step=2)]
    ledger: Ledger[int] = Ledger(tiers=(64,), micro_batches=2, depth=4)
    applied = [due for index in order for due in ledger.admit(packs[index], index)]
    loads = [due.load for due in applied]
    assert sorted(loads) == [0, 1, 2, 3, 4]
    assert [load for load in loads if load < 3] == [0, 1, 2]
    assert loads.index(2) < loads.index(3) < loads.index(4)
    copies = [due.copies for due in applied if due.load == 3]
    assert copies == [(SlotCopy(SlotRange.of(*FROM), 0, SlotRange.of(*TO), 1, 3),)]
    assert ledger.held == 0
    with pytest.raises(RemoteProtocolError, match="holds 0 tokens"):
        ledger.admit(source_step(4), 9)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        pytest.param(moving(move(generation=4)), "holds 3 tokens of generation 5", id="another generation"),
        pytest.param(moving(move(count=2)), "holds 3 tokens", id="fewer tokens than are there"),
        pytest.param(moving(move(step=2, count=4)), "holds 3 tokens", id="more tokens than are there"),
        pytest.param(moving(move(slot=1)), "holds 0 tokens", id="an empty slot"),
        pytest.param(moving(move(target=2)), "does not fit", id="beyond the range"),
        pytest.param(moving(move(), where=(32, 2, 2)), "does not fit", id="beyond the slot"),
        pytest.param(moving(move(target_generation=0)), "generation 0", id="an old generation"),
        pytest.param(moving(move(micro_batch=0, step=0)), "another range", id="from itself"),
        pytest.param(moving(move(micro_batch=2)), "no such micro-batch", id="from nowhere"),
        pytest.param(moving(move(), move(target=0)), "moves a slot twice", id="one source twice"),
        pytest.param(moving(move(), move(slot=1)), "moves a slot twice", id="one target twice"),
        pytest.param(moving(move(target=0), where=(8, 2, 16)), "moves write to", id="to half of its own"),
        pytest.param(moving(move(), first=2), "the row begins at 2", id="a row that does not continue it"),
        pytest.param(moving(move(target=0)), "holds 0 tokens", id="a row of another slot"),
    ],
)
def test_a_move_that_contradicts_what_is_stored_is_refused_and_changes_nothing(
    bad: PackHeader, why: str
) -> None:
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=4)
    for step in (1, 2, 3):
        ledger.admit(source_step(step), None)
    with pytest.raises(RemoteProtocolError, match=why):
        ledger.admit(bad, None)
    (due,) = ledger.admit(moving(move()), None)
    assert len(due.copies) == 1


def keeping(first: int = 2, where: tuple[int, int, int] = TO, **changes: int) -> PackHeader:
    return moving(move(**({"count": 2} | changes), keeps=True), first=first, where=where)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        pytest.param(keeping(generation=4), "holds 3 tokens of generation 5", id="another generation"),
        pytest.param(keeping(count=4, first=4), "holds 3 tokens", id="more tokens than are there"),
        pytest.param(keeping(slot=1), "holds 0 tokens", id="an empty slot"),
        pytest.param(keeping(target=2), "does not fit", id="beyond the range"),
        pytest.param(keeping(target_generation=0), "generation 0", id="an old generation"),
        pytest.param(keeping(micro_batch=0, step=1), "waits for itself", id="of its own step"),
        pytest.param(keeping(micro_batch=0, step=0), "another range", id="from a range it has not"),
        pytest.param(keeping(first=3), "the row begins at 3", id="a row that does not continue it"),
        pytest.param(keeping(where=(0, 2, 16), target=0), "moves write to", id="to its own cells"),
        pytest.param(keeping(where=(8, 2, 16), target=0), "moves write to", id="to half of them"),
        pytest.param(
            moving(move(count=2, keeps=True), move(target=0)), "moves a slot twice", id="and emptied as well"
        ),
        pytest.param(
            moving(move(count=2, keeps=True), move(count=2, keeps=True)),
            "moves a slot twice",
            id="one target",
        ),
    ],
)
def test_a_move_that_keeps_its_source_is_refused_where_it_contradicts_what_is_stored(
    bad: PackHeader, why: str
) -> None:
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=4)
    for step in (1, 2, 3):
        ledger.admit(source_step(step), None)
    with pytest.raises(RemoteProtocolError, match=why):
        ledger.admit(bad, None)
    two = moving(move(count=2, keeps=True), move(count=1, keeps=True, target=0), first=2)
    (due,) = ledger.admit(two, None)
    there = [SlotRange.of(*numbers) for numbers in (FROM, TO)]
    assert due.copies == (SlotCopy(there[0], 0, there[1], 1, 2), SlotCopy(there[0], 0, there[1], 0, 1))
    assert ledger.admit(source_step(4), None), "the source goes on"


def own(
    *moves: Move, rows: tuple[Row, ...], step: int = 2, where: tuple[int, int, int] = (0, 3, 16)
) -> PackHeader:
    return PackHeader(JOB, 0, 0, step, where, rows, moves=moves)


def kept(slot: int = 0, target: int = 1, count: int = 3, generation: int = 1, step: int = 1) -> Move:
    return Move(0, slot, generation, step, target, 7, count, keeps=True)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        pytest.param(own(kept(step=2), rows=(row(1, 7, 3),)), "waits for itself", id="of this very step"),
        pytest.param(own(kept(count=6), rows=(row(1, 7, 6),)), "holds 5 tokens", id="more than is there"),
        pytest.param(own(kept(slot=2), rows=(row(1, 7, 3),)), "holds 0 tokens", id="of an empty slot"),
        pytest.param(
            own(kept(), rows=(row(1, 7, 3),), where=(0, 2, 32)), "another range", id="in a range cut anew"
        ),
        pytest.param(
            own(kept(target=0), kept(), rows=(row(1, 7, 3),)),
            "moves write to",
            id="of a slot that is renewed",
        ),
        pytest.param(
            own(kept(), kept(slot=1, target=2, generation=7), rows=(row(1, 7, 3),)),
            "holds 1 tokens of generation 1",
            id="of a slot that this pack fills",
        ),
        pytest.param(
            own(kept(), kept(slot=1, target=2, count=1), rows=(row(1, 7, 3),)),
            "moves write to",
            id="of a slot that this pack overwrites",
        ),
        pytest.param(own(kept(target=0), rows=(row(0, 7, 5),)), "holds 3 tokens", id="behind what is kept"),
    ],
)
def test_a_slot_of_the_same_micro_batch_may_be_shared_or_kept_for_the_next_and_nothing_else(
    bad: PackHeader, why: str
) -> None:
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=1, depth=4)
    ledger.admit(PackHeader(JOB, 0, 0, 1, (0, 3, 16), (row(count=5), row(slot=1))), None)
    with pytest.raises(RemoteProtocolError, match=why):
        ledger.admit(bad, None)
    (due,) = ledger.admit(own(kept(), rows=(row(first=5), row(1, 7, 3))), None)
    where = due.pack.slot_range
    assert due.copies == (SlotCopy(where, 0, where, 1, 3),)
    (due,) = ledger.admit(own(kept(target=0), rows=(row(0, 7, 3),), step=3), None)
    assert due.copies == (), "it lies where it is wanted"


def test_moves_that_wait_for_one_another_are_held_and_no_more_than_the_depth() -> None:
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=2)
    for step in (1, 2):
        assert ledger.admit(moving(move(), first=step, step=step), None) == []
    with pytest.raises(RemoteProtocolError, match="step 3 came while waiting for 1"):
        ledger.admit(moving(step=3), None)
    assert ledger.held == 2


FAN = Tree((0, 1, 3), (0, 0, 0))
SLOTS = SlotRange.of(0, 2, 16)


def tree_row(first: int, accepted: tuple[int, ...] | None = None, tree: Tree | None = FAN) -> Row:
    return Row(0, 1, first, 1 if tree is None else len(tree.nodes), True, None, tree, accepted)


def after_a_tree(policy: CompactionPolicy = CompactionPolicy.EAGER) -> Ledger[None]:
    """Slot 0 holds four tokens and a tree in the cells 4 to 6."""
    ledger: Ledger[None] = Ledger(tiers=(64,), micro_batches=2, depth=16, policy=policy)
    (due,) = ledger.admit(pack_of(1, (row(count=4),)), None)
    assert due.placement is PLAIN
    (due,) = ledger.admit(pack_of(2, (tree_row(4),)), None)
    assert due.placement == Placement({0: Layout(4, 4, (), (0, 0, 0))})
    return ledger


def test_a_hole_is_closed_beside_the_row_that_says_so_and_the_slot_is_plain_again() -> None:
    ledger = after_a_tree()
    (due,) = ledger.admit(pack_of(3, (row(slot=1), tree_row(6, (0, 3), None))), None)
    assert due.copies == ()
    # the root is in its place; node 3, and the row's own token behind it, are moved
    moved = SlotCompaction(SLOTS, 0, (6, 7), 5)
    assert due.placement == Placement({1: Layout(5, 7, (6,))}, (moved,))
    (due,) = ledger.admit(pack_of(4, (row(first=7),)), None)
    assert due.placement is PLAIN


def test_a_hole_is_closed_first_where_there_is_no_room_otherwise() -> None:
    ledger = after_a_tree(CompactionPolicy.LAZY)
    (due,) = ledger.admit(pack_of(3, (tree_row(6, (0, 3), None),)), None)
    assert due.placement == Placement({0: Layout(5, 7, (6,))})
    (due,) = ledger.admit(pack_of(4, (row(first=7, count=9),)), None)
    assert due.copies == (SlotCompaction(SLOTS, 0, (6, 7), 5),)
    assert due.placement == PLAIN


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        pytest.param(tree_row(5, None, None), "does not say what of it was accepted", id="undecided"),
        pytest.param(tree_row(5, (0, 2), None), "node 2 is not held", id="a node that is not here"),
        pytest.param(tree_row(6, (0, 1, 3), None), "not a child", id="no path"),
        pytest.param(tree_row(4, (0,), None), "holds 5 tokens then, the row begins at 4", id="a step back"),
        pytest.param(tree_row(6, (0,), None), "holds 5 tokens then, the row begins at 6", id="a gap"),
        pytest.param(
            tree_row(14, (0, 1), Tree(tuple(range(3)), (0, 0, 1))),
            "would hold 17 of 16",
            id="beyond the slot",
        ),
        pytest.param(Row(1, 1, 0, 1, True, None, None, (0,)), "no tree to accept of", id="of no tree"),
        pytest.param(Row(0, 2, 0, 1, True, None, None, (0,)), "no tree to accept of", id="of another's"),
    ],
)
def test_a_row_that_does_not_fit_the_tree_before_it_is_refused_and_changes_nothing(
    bad: Row, why: str
) -> None:
    ledger = after_a_tree()
    with pytest.raises(RemoteProtocolError, match=f"micro-batch 0 step 3.*{why}"):
        ledger.admit(pack_of(3, (bad,)), None)
    assert ledger.admit(pack_of(3, (tree_row(5, (0,), None),)), None), "the honest one still goes on"
    again = after_a_tree()
    assert again.admit(pack_of(3, (Row(0, 2, 0, 1, True, None),)), None), "another sequence may have the slot"


@pytest.mark.parametrize(("count", "fits"), [(4, True), (5, False)])
def test_of_a_slot_with_a_tree_only_what_lies_in_its_place_is_shared(count: int, fits: bool) -> None:
    ledger = after_a_tree()
    shared = Move(0, 0, 1, 2, 1, 7, count, keeps=True)
    pack = pack_of(3, (row(1, 7, count), tree_row(6, (0, 3), None)))
    pack = msgspec.structs.replace(pack, moves=(shared,))
    if not fits:
        with pytest.raises(RemoteProtocolError, match="holds 4 tokens"):
            ledger.admit(pack, None)
        return
    (due,) = ledger.admit(pack, None)
    where = pack.slot_range
    assert due.copies[0] == SlotCopy(where, 0, where, 1, 4)
    assert ledger.admit(pack_of(4, (row(0, 1, 7), row(1, 7, 5))), None), "both go on"


def test_a_slot_moves_with_its_tree_and_without_its_holes() -> None:
    ledger = after_a_tree()
    ledger.admit(pack_of(3, (tree_row(6, (0, 3)),)), None)  # tokens in 0 to 5, the tree in 7 to 9
    went = Move(0, 0, 1, 3, 0, 5, 6)
    there = SlotRange.of(32, 1, 9)
    rows = (Row(0, 5, 8, 1, True, None, None, (0, 1)),)
    (due,) = ledger.admit(PackHeader(JOB, 0, 1, 1, there.numbers, rows, moves=(went,)), None)
    assert due.copies == (SlotCompaction(SLOTS, 0, (7, 8, 9), 6), SlotCopy(SLOTS, 0, there, 0, 9))
    ledger = after_a_tree()
    with pytest.raises(RemoteProtocolError, match="and its tree do not fit"):
        ledger.admit(PackHeader(JOB, 0, 1, 1, (32, 1, 6), rows, moves=(Move(0, 0, 1, 2, 0, 5, 4),)), None)
    rows = (Row(0, 5, 6, 1, True, None, None, (0, 1)),)
    same = PackHeader(JOB, 0, 1, 1, (0, 1, 16), rows, moves=(Move(0, 0, 1, 2, 0, 5, 4),))
    (due,) = ledger.admit(same, None)
    assert due.copies == (), "the same cells under another name stay as they lie"
