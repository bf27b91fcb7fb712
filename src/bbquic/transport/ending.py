"""How a connection ends: codes on the wire, and what each side tells its owner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from bbquic.errors import ConnectionLost, PeerRefused, RemoteProtocolError, TransportError
from bbquic.transport.identity import Fingerprint
from bbquic.transport.printable import printable
from bbquic.units import Seconds


class CloseCode(IntEnum):
    """Application error codes of CONNECTION_CLOSE."""

    DONE = 0xB000  # its owner closed it
    UNPINNED = 0xB001  # the key is not pinned
    REFUSED = 0xB002  # the two cannot work together; the phrase says why
    BAD_MESSAGE = 0xB003  # a message broke the protocol; the phrase says how
    BUSY = 0xB004  # too many connections
    NO_HELLO = 0xB005  # handshake or hello took too long
    INTERNAL = 0xB006  # this side failed


class ResetCode(IntEnum):
    """Application error codes of RESET_STREAM."""

    CANCELLED = 0xB010  # the sender gave the message up half way; it is dropped


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a channel ended. Each who asks gets an exception of its own, as tracebacks are not shared."""

    error_type: type[TransportError]
    text: str
    hint: str | None = None

    def error(self) -> TransportError:
        return self.error_type(self.text, hint=self.hint)


def closed_here(peer: str, reason: str) -> Ending:
    return Ending(ConnectionLost, f"the connection to {peer} was closed here" + _because(reason))


def silent(peer: str, after: Seconds) -> Ending:
    return Ending(ConnectionLost, f"nothing was heard from {peer} for {after:.3g} s")


def bad_message(peer: str, error: TransportError) -> Ending:
    return Ending(RemoteProtocolError, f"{peer} broke the protocol: {error}")


def wrong_key(peer: str, fingerprint: Fingerprint | None) -> Ending:
    key = fingerprint or "no key at all"
    return Ending(
        PeerRefused,
        f"{peer} answered with a key that is not pinned for it: {key}",
        hint=f"check {peer}'s address; if it has a new key, add it to {peer}'s keys in peers.toml",
    )


def unpinned_reason(fingerprint: Fingerprint | None) -> str:
    """What a machine is told whose key the other does not know."""
    return f"{fingerprint or 'no key'} is not pinned in peers.toml"


def closed_by_peer(peer: str, code: int, reason: str) -> Ending:
    """What a peer's close means to us. `reason` is the peer's text and not trusted to be printable."""
    reason = printable(reason)
    if code == CloseCode.DONE:
        return Ending(ConnectionLost, f"{peer} closed the connection" + _because(reason))
    if code == CloseCode.UNPINNED:
        return Ending(
            PeerRefused,
            f"{peer} does not know this machine's key" + _because(reason),
            hint=f"paste this machine's [[peer]] entry into peers.toml on {peer} and restart it there",
        )
    if code == CloseCode.REFUSED:
        return Ending(PeerRefused, reason or f"{peer} refused the connection")
    if code == CloseCode.BUSY:
        return Ending(PeerRefused, f"{peer} has too many connections" + _because(reason))
    if code == CloseCode.BAD_MESSAGE:
        return Ending(ConnectionLost, f"{peer} rejected a message from here" + _because(reason))
    return Ending(ConnectionLost, f"the connection to {peer} ended with code {code:#x}" + _because(reason))


def broken(peer: str, code: int, reason: str) -> Ending:
    """QUIC itself gave up: an error of its own, found on either side."""
    return Ending(
        ConnectionLost, f"the connection to {peer} broke (QUIC error {code:#x})" + _because(printable(reason))
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
