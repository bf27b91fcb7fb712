"""The check of keys inside the handshake, on two connections without sockets or a clock."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

import pytest
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from bbquic.errors import TransportError
from bbquic.transport import quic, selfcheck
from bbquic.transport.ending import CloseCode
from bbquic.transport.fast import FastConnection
from bbquic.transport.identity import Fingerprint, Identity, PrivateKey, fingerprint_of, make_identity
from bbquic.transport.options import EndpointOptions
from bbquic.transport.quic import PinnedConnection, check_aioquic, configuration

ADDRESS = ("192.0.2.1", 4433)
SERVER = make_identity("server")
CLIENT = make_identity("client")
READ_ME = b"read me" * 1000  # several datagrams, which come in one batch with the end of the handshake


Kind = type[PinnedConnection]
kinds = pytest.mark.parametrize("kind", [PinnedConnection, FastConnection], ids=["stock", "fast"])


def accepting(kind: Kind, *pinned: Fingerprint, original: bytes = bytes(8)) -> PinnedConnection:
    options = EndpointOptions()
    return kind(
        is_pinned=lambda fingerprint: fingerprint in pinned,
        options=options,
        configuration=configuration(SERVER, options, ADDRESS, is_client=False),
        original_destination_connection_id=original,
    )


def stock_client(identity: Identity | None, alpn: str = "bbquic") -> QuicConnection:
    """aioquic as it is, which sends stream bytes with its first breath after the handshake."""
    settings = QuicConfiguration(is_client=True, alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE)
    if identity is not None:
        settings.certificate, settings.private_key = identity.certificate, identity.private_key
    client = QuicConnection(configuration=settings)
    client.connect(ADDRESS, now=0.0)
    client.send_stream_data(2, READ_ME, end_stream=True)
    return client


def exchange(client: QuicConnection, server: PinnedConnection) -> list[events.QuicEvent]:
    """Let both talk until neither has more to say; the server's events."""
    now = 0.0
    for _ in range(20):
        batch = []
        for _ in range(5):  # what its pacing lets go within 50 ms arrives at once
            now += 0.01
            batch += client.datagrams_to_send(now)
        server.receive_batch([data for data, _ in batch], ADDRESS, now)
        for train in server.trains_to_send(now) if server._network_paths else []:
            for data in train.datagrams():
                client.receive_datagram(data, ADDRESS, now)
    seen = []
    event = server.next_event()
    while event is not None:
        seen.append(event)
        event = server.next_event()
    return seen


def start(
    client: QuicConnection, *pinned: Fingerprint, kind: Kind = PinnedConnection
) -> tuple[PinnedConnection, list[events.QuicEvent]]:
    server = accepting(kind, *pinned, original=client.original_destination_connection_id)
    return server, exchange(client, server)


def stream_bytes(seen: list[events.QuicEvent]) -> bytes:
    return b"".join(event.data for event in seen if isinstance(event, events.StreamDataReceived))


def certificate(key: PrivateKey, *, before: datetime, after: datetime) -> Identity:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "anybody")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(before)
        .not_valid_after(after)
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    )
    return Identity(key, made, fingerprint_of(made))


@kinds
def test_a_pinned_client_is_known_and_its_streams_are_read(kind: Kind) -> None:
    server, seen = start(stock_client(CLIENT), CLIENT.fingerprint, kind=kind)
    assert server.is_known
    assert server.fingerprint == CLIENT.fingerprint
    assert stream_bytes(seen) == READ_ME


@kinds
@pytest.mark.parametrize("identity", [make_identity("stranger"), None], ids=["strange key", "no certificate"])
def test_an_unknown_client_is_cut_off_before_any_stream_is_looked_at(
    identity: Identity | None, kind: Kind
) -> None:
    client = stock_client(identity)
    server, seen = start(client, CLIENT.fingerprint, kind=kind)
    assert not server.is_known
    assert stream_bytes(seen) == b""
    assert server._streams == {}
    assert server.closing is not None
    assert server.closing.error_code == CloseCode.UNPINNED
    told = client._close_event
    assert told is not None
    assert told.error_code == CloseCode.UNPINNED
    assert told.frame_type is None
    assert "is not pinned in peers.toml" in told.reason_phrase


@kinds
def test_what_an_unknown_client_sends_later_is_not_read_either(kind: Kind) -> None:
    client = stock_client(None)
    server, _ = start(client, CLIENT.fingerprint, kind=kind)
    server._close_pending = False  # as if its close were lost, and the client sent on
    client._close_event, client._state = None, type(client._state).CONNECTED
    client.send_stream_data(6, b"and this", end_stream=True)
    assert stream_bytes(exchange(client, server)) == b""
    assert server._streams == {}


def test_a_client_without_our_protocol_name_is_refused() -> None:
    server, seen = start(stock_client(CLIENT, alpn="h3"), CLIENT.fingerprint)
    assert not server.is_known
    assert stream_bytes(seen) == b""


@pytest.mark.parametrize("years", [(2001, 2002), (2090, 2099)], ids=["expired", "not yet valid"])
def test_dates_in_a_certificate_do_not_matter(years: tuple[int, int]) -> None:
    before, after = (datetime(year, 1, 1, tzinfo=UTC) for year in years)
    identity = certificate(ed25519.Ed25519PrivateKey.generate(), before=before, after=after)
    server, seen = start(stock_client(identity), identity.fingerprint)
    assert server.is_known
    assert stream_bytes(seen) == READ_ME


def test_a_p256_key_does_as_well() -> None:
    before, after = datetime(2001, 1, 1, tzinfo=UTC), datetime(2002, 1, 1, tzinfo=UTC)
    identity = certificate(ec.generate_private_key(ec.SECP256R1()), before=before, after=after)
    server, _ = start(stock_client(identity), identity.fingerprint)
    assert server.is_known


def test_a_certificate_without_its_private_key_proves_nothing() -> None:
    thief = make_identity("thief")
    stolen = Identity(thief.private_key, CLIENT.certificate, CLIENT.fingerprint)
    server, seen = start(stock_client(stolen), CLIENT.fingerprint)
    assert not server.is_known
    assert stream_bytes(seen) == b""
    assert server.closing is not None


def test_the_server_is_checked_before_the_client_shows_its_own_key() -> None:
    options = EndpointOptions()
    client = PinnedConnection(
        is_pinned=lambda fingerprint: False,
        options=options,
        configuration=configuration(CLIENT, options, ADDRESS, is_client=True),
    )
    client.connect(ADDRESS, now=0.0)
    server, _ = start(client, CLIENT.fingerprint)
    assert client.fingerprint == SERVER.fingerprint
    assert client.closing is not None
    assert client.closing.error_code == CloseCode.UNPINNED
    assert server.fingerprint is None  # it never saw who dialled


def test_an_aioquic_that_lacks_what_we_rely_on_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_aioquic(EndpointOptions(), SERVER)
    monkeypatch.setattr(quic, "SENDER_PARTS", ("_buffer_begin",))
    with pytest.raises(TransportError, match="it lacks _buffer_begin") as caught:
        check_aioquic(EndpointOptions(), SERVER)
    assert caught.value.hint is not None
    assert "aioquic>=1.7.2" in caught.value.hint


def test_fast_paths_that_do_not_fit_are_left_out_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    selfcheck.check_fast_paths()
    assert selfcheck.connection_type(EndpointOptions()) is FastConnection
    assert selfcheck.connection_type(EndpointOptions(fast_paths=False)) is PinnedConnection
    selfcheck._fast_paths_work.cache_clear()
    monkeypatch.setattr(selfcheck, "SENDER_PARTS", "_buffer_begin _buffer")
    with caplog.at_level("WARNING", "bbquic.transport"):
        for _ in range(2):
            assert selfcheck.connection_type(EndpointOptions()) is PinnedConnection
    selfcheck._fast_paths_work.cache_clear()
    assert [record.getMessage().endswith("it lacks _buffer_begin") for record in caplog.records] == [True]
