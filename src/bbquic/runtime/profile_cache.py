"""Profiles that were measured before, kept by what they depend on: device, threads, model, dtype, version.

It is a convenience: whatever is wrong with it costs seconds of measuring, never a run.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from bbquic import __version__
from bbquic.runtime.profile import WireProfile
from bbquic.transport.printable import printable

logger = logging.getLogger("bbquic.node")

MOST_FILE = 1 << 20  # bytes; a profile takes 2 KB, more is not ours


class ProfileKey(msgspec.Struct, frozen=True):
    """What a profile depends on. `config` is a digest of the model's config: its shapes follow from it."""

    device: str
    threads: int
    config: str
    dtype: str
    version: str

    @classmethod
    def of(cls, device: str, threads: int, config: Mapping[str, str], dtype: str) -> ProfileKey:
        """`config` as a manifest has it: fields as canonical JSON."""
        encoded = msgspec.json.encode(dict(config), order="deterministic")
        return cls(device, threads, hashlib.sha256(encoded).hexdigest()[:32], dtype, __version__)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: ProfileKey
    profile: WireProfile
    check: str  # of the two: a figure that was changed looks like any other

    @classmethod
    def of(cls, key: ProfileKey, profile: WireProfile) -> _File:
        encoded = msgspec.json.encode((key, profile), order="deterministic")
        return cls(key, profile, hashlib.sha256(encoded).hexdigest()[:32])


class ProfileCache:
    """One JSON file a profile in `folder`; with None it remembers nothing. Only one thread's at a time."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def recall(self, key: ProfileKey) -> WireProfile | None:
        """What was measured for this key; None, and a line in the log, where the file is damaged."""
        if self._folder is None:
            return None
        place = self._place(key)
        try:
            with place.open("rb") as file:
                data = file.read(MOST_FILE + 1)
            if len(data) > MOST_FILE:
                raise ValueError(f"over {MOST_FILE} bytes")
            held = msgspec.json.decode(data, type=_File)
            if held != _File.of(key, held.profile):
                raise ValueError("it was changed, or is of another device or model")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            logger.warning("%s is not used, and measured anew: %s", place, printable(str(error)))
            return None
        return held.profile

    def remember(self, key: ProfileKey, profile: WireProfile) -> None:
        """Keep it, whole or not at all. A folder that cannot be written is logged."""
        if self._folder is None:
            return
        place = self._place(key)
        scratch = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(_File.of(key, profile))))
            scratch.replace(place)
        except OSError as error:
            logger.warning("%s cannot be written, the profile is measured anew next time: %s", place, error)
            with suppress(OSError):
                scratch.unlink()

    def forget(self, key: ProfileKey) -> None:
        """Measure anew next time."""
        if self._folder is not None:
            with suppress(OSError):
                self._place(key).unlink()

    def _place(self, key: ProfileKey) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]}.json"
