"""What a channel learns of its link, over real sockets on loopback and two ends of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transport_helpers import make_identities, make_peers, run, text

from bbquic.errors import ConnectionLost, RemoteProtocolError
from bbquic.transport.channel import Channel, Endpoint, Role
from bbquic.transport.identity import Identity, Peer
from bbquic.transport.link_memory import LinkMemory
from bbquic.transport.message import Kind, Message, encode_header
from bbquic.transport.options import EndpointOptions
from bbquic.transport.report import RateReport
from bbquic.transport.threaded import open_endpoint

NAMES = ("home-a", "home-b")


async def joined(
    identities: dict[str, Identity], peers: dict[str, Peer], options: EndpointOptions
) -> tuple[Endpoint, Endpoint, Channel, Channel]:
    """Two endpoints on loopback, and both ends of a channel between them."""
    a = await open_endpoint(identities["home-a"], peers, Role.COMMAND, host="127.0.0.1", options=options)
    b = await open_endpoint(identities["home-b"], peers, Role.NODE, host="127.0.0.1")
    channel = await a.connect(replace(peers["home-b"], address=b.address))
    return a, b, channel, await b.accept()


def test_a_report_of_the_peer_becomes_the_link_s_rate_and_outlives_the_connection(tmp_path: Path) -> None:
    links = tmp_path / "links.json"

    async def main() -> None:
        identities = make_identities(*NAMES)
        peers = make_peers(identities)
        a, b, channel, other = await joined(identities, peers, EndpointOptions(links=links))
        link = channel.statistics().link
        assert link is not None
        assert link.reports == 0
        await other.send(Message(Kind.RATE, encode_header(RateReport(7, 2_500_000, 32, 10))))
        await other.send(text("behind it"))
        await channel.receive()
        while (link := channel.statistics().link) is None or not link.reports:
            await other.send(text("again"))
            await channel.receive()
        assert link.rate == pytest.approx(2_500_000)
        await a.close()
        await b.close()
        known = LinkMemory(links).recall("home-b", identities["home-b"].fingerprint, 0.0)
        assert known is not None
        assert known.rate == pytest.approx(2_500_000)

        a, b, channel, other = await joined(identities, peers, EndpointOptions(links=links))
        link = channel.statistics().link
        assert link is not None
        assert link.rate == pytest.approx(2_500_000), "remembered"
        assert link.reports == 0
        await a.close()
        await b.close()

    run(main)


@pytest.mark.parametrize(
    "header", [b"\x90", b"\x94\x01\x02\x03", encode_header(RateReport(1, 10**6, 32, 1))[:-1] + b"\xc3"]
)
def test_a_damaged_report_costs_the_peer_its_connection(header: bytes) -> None:
    async def main() -> None:
        identities = make_identities(*NAMES)
        a, b, channel, other = await joined(identities, make_peers(identities), EndpointOptions())
        await other.send(Message(Kind.RATE, header))
        with pytest.raises(RemoteProtocolError):
            await channel.receive()
        with pytest.raises((ConnectionLost, RemoteProtocolError)):
            await other.receive()
        await a.close()
        await b.close()

    run(main)


def test_a_probe_of_a_path_without_bottleneck_ends_within_its_budget_and_carries_no_message() -> None:
    async def main() -> None:
        identities = make_identities(*NAMES)
        a, b, channel, other = await joined(identities, make_peers(identities), EndpointOptions())
        result = await channel.probe()
        assert result.bytes_sent <= 1_000_000
        await channel.send(text("after it"))
        message = await other.receive()
        assert message.header == b"after it"
        await a.close()
        await b.close()

    run(main)
