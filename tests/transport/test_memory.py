"""What the network in memory can do beyond the promises of every endpoint."""

from __future__ import annotations

import asyncio
import random

from transport_helpers import make_identities, make_peers, run, text

from bbquic.transport.channel import Role
from bbquic.transport.memory import MemoryNetwork


def arrivals(seed: int, count: int = 20) -> list[bytes]:
    order: list[bytes] = []

    async def main() -> None:
        identities = make_identities("a", "b")
        peers = make_peers(identities)
        network = MemoryNetwork(random.Random(seed))
        a = network.endpoint(identities["a"], peers, Role.COMMAND)
        b = network.endpoint(identities["b"], peers, Role.NODE)
        there = await a.connect(type(peers["b"])("b", b.address, peers["b"].keys))
        here = await b.accept()
        for number in range(count):
            await there.send(text(str(number)))
            await asyncio.sleep(0)
        order.extend([(await here.receive()).header for _ in range(count)])

    run(main)
    return order


def test_a_drawn_order_of_arrival_loses_nothing() -> None:
    for seed in range(10):
        assert sorted(arrivals(seed)) == sorted(str(number).encode() for number in range(20))


def test_a_drawn_order_of_arrival_is_not_the_order_of_sending() -> None:
    in_order = [str(number).encode() for number in range(20)]
    assert any(arrivals(seed) != in_order for seed in range(5))


def test_a_seed_gives_the_same_order_again() -> None:
    assert arrivals(7) == arrivals(7)
    assert arrivals(7) != arrivals(8)
