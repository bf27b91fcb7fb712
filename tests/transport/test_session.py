"""The hello: exchanged first, once, and plain about what does not fit."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_helpers import text

from bbquic.errors import PeerRefused, RemoteProtocolError
from bbquic.transport.channel import Role
from bbquic.transport.message import Kind, Message, encode_header
from bbquic.transport.session import HELD_BYTES, HELD_MESSAGES, Hello, Session, new_hello


def session(engine: str = "0.1.0", wire: int = 1) -> Session:
    return Session(new_hello(Role.NODE, engine, wire), name="laptop", peer="home-b")


def hello(*, wire: int = 1, engine: str = "0.1.0", role: str = "node") -> Message:
    return Message(Kind.HELLO, encode_header(Hello(wire, engine, role, "00" * 8)))


def test_messages_pass_once_the_hello_is_here() -> None:
    ours = session()
    assert ours.receive_untrusted(hello(role="command")) == []
    assert ours.receive_untrusted(text("a")) == [text("a")]
    assert ours.role is Role.COMMAND


def test_messages_that_overtake_the_hello_are_held_until_it_comes() -> None:
    ours = session()
    assert ours.receive_untrusted(text("a")) == []
    assert ours.receive_untrusted(text("b")) == []
    assert ours.peer_hello is None
    assert ours.receive_untrusted(hello()) == [text("a"), text("b")]


def test_too_many_messages_before_the_hello_are_an_error() -> None:
    ours = session()
    for _ in range(HELD_MESSAGES):
        ours.receive_untrusted(text("a"))
    with pytest.raises(RemoteProtocolError, match="before any hello"):
        ours.receive_untrusted(text("a"))


def test_too_many_bytes_before_the_hello_are_an_error() -> None:
    ours = session()
    with pytest.raises(RemoteProtocolError, match="before any hello"):
        ours.receive_untrusted(Message(Kind.HIDDEN, b"", bytes(HELD_BYTES)))


def test_a_second_hello_is_an_error() -> None:
    ours = session()
    ours.receive_untrusted(hello())
    with pytest.raises(RemoteProtocolError, match="a second hello"):
        ours.receive_untrusted(hello())


@pytest.mark.parametrize("engine", ["0.2.0", "1.1.0", "0.10", "10.1"])
def test_another_minor_or_major_version_is_refused_naming_both(engine: str) -> None:
    with pytest.raises(PeerRefused) as caught:
        session().receive_untrusted(hello(engine=engine))
    assert str(caught.value) == f"laptop runs bbquic 0.1.0 (wire 1), home-b runs {engine} (wire 1)"


@pytest.mark.parametrize("engine", ["0.1", "0.1.7", "0.1.0.dev3+local"])
def test_another_patch_version_is_fine(engine: str) -> None:
    assert session().receive_untrusted(hello(engine=engine)) == []


def test_another_wire_version_is_refused_naming_both_even_if_it_knows_roles_and_fields_we_do_not() -> None:
    later = msgspec.msgpack.encode([2, "0.1.0", "observer", "00", {"more": "fields"}])
    with pytest.raises(PeerRefused) as caught:
        session().receive_untrusted(Message(Kind.HELLO, later))
    assert str(caught.value) == "laptop runs bbquic 0.1.0 (wire 1), home-b runs 0.1.0 (wire 2)"


def test_the_hellos_layout_is_frozen() -> None:
    sample = Hello(1, "0.1.0", "node", "0011223344556677")
    assert encode_header(sample) == b"\x94\x01\xa50.1.0\xa4node\xb00011223344556677"


def test_an_unknown_role_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="role"):
        session().receive_untrusted(hello(role="king"))


@pytest.mark.parametrize("engine", ["", "latest", "0", "0.1.0\n", "0.1.0 \x1b[31m", "0.1" + "0" * 100])
def test_an_engine_version_that_is_none_is_an_error(engine: str) -> None:
    with pytest.raises(RemoteProtocolError, match="names no version"):
        session().receive_untrusted(hello(engine=engine))


@given(st.data())
def test_one_changed_byte_in_a_hello_gives_a_session_or_a_refusal(data: st.DataObject) -> None:
    changed = bytearray(hello().header)
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    ours = session()
    with suppress(RemoteProtocolError, PeerRefused):
        ours.receive_untrusted(Message(Kind.HELLO, bytes(changed)))
        assert ours.role in Role


def test_two_processes_of_a_machine_have_different_hellos() -> None:
    assert new_hello(Role.NODE, "0.1.0").instance != new_hello(Role.NODE, "0.1.0").instance
