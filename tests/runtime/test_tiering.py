"""Tiers hold every slot on either side, as many of each micro-batch wherever memory allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bbquic.kv.ranges import CELL_ALIGNMENT, MAX_TIERS
from bbquic.runtime.tiering import Room, Tiering, longest_slot, tiers_of

UNLIMITED = Room(10**9, 10**9)


def tiers(offloaded: list[int], batch: int, micro_batches: int, room: Room = UNLIMITED) -> Tiering:
    return tiers_of(offloaded, [room] * len(offloaded), batch=batch, slot=16, micro_batches=micro_batches)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Room], int, int]:
    batch = draw(st.integers(1, 40))
    stages = draw(st.integers(1, 5))
    offloaded = [draw(st.integers(0, batch)) for _ in range(stages)]
    cells = st.integers(0, 3000)
    rooms = [Room(draw(cells), draw(st.none() | cells)) for _ in range(stages)]
    return offloaded, rooms, batch, draw(st.integers(1, batch))


@given(cases(), st.integers(1, 400))
def test_all_slots_have_their_cells_and_no_stage_more_than_it_has_room_for(
    case: tuple[list[int], list[Room], int, int], wish: int
) -> None:
    offloaded, rooms, batch, micro_batches = case
    slot = longest_slot(rooms, offloaded, batch, wish)
    assert slot <= wish
    assert slot % CELL_ALIGNMENT == 0
    longer = slot + CELL_ALIGNMENT
    sides = [((batch - k) * longer, k * longer) for k in offloaded]
    assert longer > wish or not all(room.takes(*side) for room, side in zip(rooms, sides, strict=True))
    if not slot:
        return
    made = tiers_of(offloaded, rooms, batch=batch, slot=slot, micro_batches=micro_batches)
    assert sum(made.sizes) >= batch * slot
    assert len(made.sizes) <= MAX_TIERS
    assert min(made.sizes) > 0
    for stage, (slots, room) in enumerate(zip(offloaded, rooms, strict=True)):
        device, host = made.on_device(stage), made.beside(stage)
        assert device + host == sum(made.sizes)
        assert device <= (batch - slots) * slot
        assert host >= slots * slot
        assert room.takes(device, host)
        assert bool(made.on_host[stage]) == bool(slots)


@given(cases())
def test_each_micro_batch_has_whole_slots_in_every_tier_where_hosts_have_the_memory(
    case: tuple[list[int], list[Room], int, int],
) -> None:
    offloaded, _, batch, micro_batches = case
    made = tiers([k or 1 for k in offloaded], batch, micro_batches)
    assert all(cells % (micro_batches * 16) == 0 for cells in made.sizes)
    for stage, slots in enumerate(offloaded):
        assert made.beside(stage) < (max(slots, 1) + 2 * micro_batches) * 16  # and no more than it takes


def test_the_last_tiers_are_on_the_hosts_of_those_who_offload_more() -> None:
    assert tiers([10], 32, 4) == Tiering((20 * 16, 12 * 16), (1,))  # five on the device and three, four times
    assert tiers([4, 0, 12], 32, 4) == Tiering((20 * 16, 8 * 16, 4 * 16), (1, 0, 2))
    assert tiers([32, 8], 32, 4) == Tiering((24 * 16, 8 * 16), (2, 1))
    assert tiers([0, 0], 32, 4) == Tiering((32 * 16,), (0, 0))
    # a host without room for twelve slots: some micro-batch has one less there
    assert tiers([10], 32, 4, Room(10**9, 11 * 16)) == Tiering((22 * 16, 10 * 16), (1,))


def test_stages_of_more_unlike_shares_than_there_can_be_tiers_offload_some_slots_more() -> None:
    asked = list(range(1, 41))
    made = tiers(asked, 64, 1)
    assert len(made.sizes) == MAX_TIERS
    assert all(k * 16 <= made.beside(stage) <= (k + 3) * 16 for stage, k in enumerate(asked))
