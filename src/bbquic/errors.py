"""The one tree of errors. A class exists because a caller acts differently on it.

Library code raises where it knows and catches where it can act; the command line alone turns a
`BBQuicError` into `error:`, `hint:` and an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping


class BBQuicError(Exception):
    """Base of everything this package raises on purpose: a sentence, and what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(BBQuicError):
    """A flag, peers.toml, a key file or a path is wrong; nothing was started."""

    exit_code = 2


class ModelError(BBQuicError):
    """A model is missing, damaged, of an unknown family, or does not fit."""


class JobError(BBQuicError):
    """The job as a whole cannot run: its file cannot be read, or its answers cannot be kept."""


class RecordError(BBQuicError):
    """One line of a job is not answerable; it becomes an error record and the rest goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransportError(BBQuicError):
    """Something between two machines."""


class PeerUnreachable(TransportError):
    """A peer did not answer within the deadline."""


class PeerRefused(TransportError):
    """A peer, or this side, refused the connection or a request on it: key, version or right."""


class ConnectionLost(TransportError):
    """A connection that was up ended."""


class RemoteProtocolError(TransportError):
    """A peer's bytes are not what the protocol allows. Costs that peer its connection, nothing else."""


class PlanRefused(BBQuicError):
    """A node cannot or may not carry out a plan; names both sides."""


class PlanImpossible(BBQuicError):
    """No layout of the model fits these nodes.

    `needs`: by node, the bytes it would need in the nearest even attempt and those it has; `change`: the one
    node that with the fewest bytes more would make it fit, and how many. Both are empty where memory is not
    what is missing.
    """

    def __init__(
        self,
        message: str,
        *,
        needs: Mapping[str, tuple[int, int]] | None = None,
        change: tuple[str, int] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.needs = dict(needs or {})
        self.change = change


class StageFailed(BBQuicError):
    """A stage could not compute: names node, blocks, micro-batch and step."""

    def __init__(self, message: str, *, node: str, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.node = node
        self.code = code


class Stalled(BBQuicError):
    """A wait ran into its deadline: names who waited, for what, and for how long."""
