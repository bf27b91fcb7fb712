"""Hashes of tensors in files, and a memory of them that no changed file can fool."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from bbquic.errors import ModelError
from bbquic.model.stored import StoredTensor

CHUNK = 1 << 20  # bytes read at a time
SETTLED = 1_000_000_000  # ns; a file changed within it may change again at the same time stamp


class _Remembered(msgspec.Struct, frozen=True):
    """What a file was when it was hashed, and its tensors' sha256 by name."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int  # unlike mtime, no copy or `touch` can set it back
    inode: int
    tensors: dict[str, str] = {}

    def same_file(self, other: _Remembered) -> bool:
        return msgspec.structs.replace(self, tensors={}) == msgspec.structs.replace(other, tensors={})


class HashCache:
    """Remembers hashes in `folder`, one file for each weight file; with None it remembers nothing.

    A folder that cannot be written, or a damaged memory in it, only costs time.
    """

    def __init__(self, folder: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._folder = folder
        self._now_ns = now_ns

    def of_tensors(self, file: Path, tensors: Sequence[StoredTensor]) -> Mapping[str, str]:
        """sha256 of each tensor's bytes, by name. Raises: ModelError where the file cannot be read."""
        try:
            before = _stat(file)
            known = dict(self._recall(before))
            missing = [tensor for tensor in tensors if tensor.name not in known]
            if missing:
                known |= _hash_tensors(file, missing)
                if not before.same_file(_stat(file)):
                    raise ModelError(f"{file} changed while it was read")
                self._remember(msgspec.structs.replace(before, tensors=known))
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from error
        return known

    def _recall(self, now: _Remembered) -> Mapping[str, str]:
        if self._folder is None:
            return {}
        try:
            then = msgspec.json.decode(self._place(now).read_bytes(), type=_Remembered)
        except (OSError, msgspec.MsgspecError):
            return {}
        return then.tensors if then.same_file(now) else {}

    def _remember(self, entry: _Remembered) -> None:
        if self._folder is None or self._now_ns() - max(entry.mtime_ns, entry.ctime_ns) < SETTLED:
            return
        place = self._place(entry)
        scratch = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(msgspec.json.encode(entry))
            scratch.replace(place)
        except OSError:
            with suppress(OSError):
                scratch.unlink()

    def _place(self, entry: _Remembered) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(entry.path.encode()).hexdigest()}.json"


def file_sha256(path: Path) -> str:
    """Of a whole file, streamed. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stat(file: Path) -> _Remembered:
    path = file.resolve()
    found = path.stat()
    return _Remembered(str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _hash_tensors(file: Path, tensors: Sequence[StoredTensor]) -> dict[str, str]:
    digests = {}
    buffer = memoryview(bytearray(CHUNK))
    with file.open("rb", buffering=0) as opened:
        for tensor in tensors:
            digest = hashlib.sha256()
            opened.seek(tensor.start)
            left = tensor.length
            while left:
                count = opened.readinto(buffer[: min(left, CHUNK)])
                if not count:
                    raise ModelError(f"{file} is cut short within {tensor.name}")
                digest.update(buffer[:count])
                left -= count
            digests[tensor.name] = digest.hexdigest()
    return digests
