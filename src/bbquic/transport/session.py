"""The hello at the start of a connection: who speaks what, before anything else is said.

A pure state machine: messages in, messages that may be handed on out. It knows no socket and no clock.
"""

from __future__ import annotations

import os
import re

import msgspec

from bbquic.errors import PeerRefused, RemoteProtocolError
from bbquic.transport.channel import Role
from bbquic.transport.message import WIRE_VERSION, Kind, Message, decode_header_untrusted, encode_header

HELD_MESSAGES = 64  # streams may overtake the hello's; a sender of ours waits for its acknowledgement
HELD_BYTES = 1 << 20  # for the same reason: what overtakes is small, or is not ours
ENGINE = re.compile(r"(\d{1,6})\.(\d{1,6})[0-9A-Za-z.+-]{0,32}")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """HELLO's header, a msgpack array. Its prefix and these four stay as they are in all wire versions
    (later ones may append), so that a mismatch can be told in words."""

    wire: int
    engine: str
    role: str
    instance: str  # 8 random bytes in hex: tells two processes, and a restart, of one machine apart


def new_hello(role: Role, engine: str, wire: int = WIRE_VERSION) -> Hello:
    """This process's hello, the same on all its connections. `engine` is bbquic's own version."""
    return Hello(wire, engine, role.value, os.urandom(8).hex())


class Session:
    """One connection's hello exchange, seen from one side."""

    def __init__(self, hello: Hello, *, name: str, peer: str) -> None:
        """`hello` is ours; `name` is this machine, `peer` the other, as peers.toml calls them."""
        self._hello = hello
        self._name = name
        self._peer = peer
        self._peer_hello: Hello | None = None
        self._held: list[Message] = []
        self._held_bytes = 0

    @property
    def peer_hello(self) -> Hello | None:
        return self._peer_hello

    @property
    def role(self) -> Role:
        """The peer's role. Only once its hello is here."""
        assert self._peer_hello is not None
        return Role(self._peer_hello.role)

    def hello(self) -> Message:
        """The message to send first."""
        return Message(Kind.HELLO, encode_header(self._hello))

    def receive_untrusted(self, message: Message) -> list[Message]:
        """Take a message from the peer; the messages that may now be handed on, in order of arrival.

        Raises: RemoteProtocolError on a bad or second hello, or when too much arrives before the first;
        PeerRefused when the two cannot work together, naming both.
        """
        if message.kind is Kind.HELLO:
            self._receive_hello_untrusted(message)
            held, self._held, self._held_bytes = self._held, [], 0
            return held
        if self._peer_hello is not None:
            return [message]
        self._held_bytes += message.size
        if len(self._held) >= HELD_MESSAGES or self._held_bytes > HELD_BYTES:
            raise RemoteProtocolError(
                f"over {HELD_MESSAGES} messages or {HELD_BYTES} bytes arrived before any hello"
            )
        self._held.append(message)
        return []

    def _receive_hello_untrusted(self, message: Message) -> None:
        if self._peer_hello is not None:
            raise RemoteProtocolError("a second hello arrived")
        hello = decode_header_untrusted(Hello, message.header)
        theirs = ENGINE.fullmatch(hello.engine)
        if theirs is None:
            raise RemoteProtocolError("a hello names no version of the engine")
        ours = ENGINE.fullmatch(self._hello.engine)
        assert ours is not None, self._hello.engine
        if hello.wire != self._hello.wire or theirs.groups() != ours.groups():
            raise PeerRefused(
                f"{self._name} runs bbquic {_versions(self._hello)}, {self._peer} runs {_versions(hello)}",
                hint="install the same bbquic on both",
            )
        if hello.role not in {role.value for role in Role}:
            raise RemoteProtocolError("a hello names no role known here")
        self._peer_hello = hello


def _versions(hello: Hello) -> str:
    return f"{hello.engine} (wire {hello.wire})"
