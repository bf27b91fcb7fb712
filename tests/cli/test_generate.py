"""The command line as a user meets it: real processes, real sockets, the real model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tiny_model import make_tiny_llama

DATA = Path(__file__).parent.parent / "data"
DEADLINE = 240  # seconds for a whole run


def bbquic(*arguments: str | Path, cwd: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bbquic", *map(str, arguments)],
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


def read_answers(path: Path) -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {record["line"]: record for record in records}
    assert len(by_line) == len(records)
    return by_line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def write_prompts(path: Path, records: Sequence[dict[str, Any] | str]) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_without_a_cluster_local_nodes_answer_and_it_is_said_so(tiny: Path, tmp_path: Path) -> None:
    records = [{"id": f"q{n}", "prompt": f"the of {n}", "max_tokens": 8} for n in range(5)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", records)
    code, out, err = finished(bbquic("generate", prompts, "--model", tiny, "--nodes", "2", cwd=tmp_path))
    assert code == 0, err
    assert out == "", "data goes to the file, everything else to standard error"
    assert "starting 2 nodes on this machine" in err
    assert "answered 5 of 5 lines" in err
    answers = read_answers(tmp_path / "prompts.answers.jsonl")
    assert {record["id"] for record in answers.values()} == {f"q{n}" for n in range(5)}


def test_bad_lines_have_error_records_and_the_exit_code_says_partial(tiny: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any] | str] = [
        {"prompt": "a", "max_tokens": 2},
        "{nonsense",
        {"prompt": "b" * 600},
        {"prompt": "c", "n": 2},
    ]
    prompts = write_prompts(tmp_path / "prompts.jsonl", records)
    arguments = ("generate", prompts, "--model", tiny, "--nodes", "1", "-o", "-")
    code, out, err = finished(bbquic(*arguments, cwd=tmp_path))
    assert code == 3, err
    by_line = {record["line"]: record for record in map(json.loads, out.splitlines())}
    codes = {line: record["error"]["code"] for line, record in by_line.items() if "error" in record}
    assert codes == {2: "invalid_json", 3: "prompt_too_long", 4: "unsupported_field"}
    assert by_line[1]["finish_reason"] in ("length", "stop")


def test_strict_refuses_a_bad_file_before_any_work(tiny: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "a"}, "{nonsense"])
    code, _, err = finished(bbquic("generate", prompts, "--model", tiny, "--strict", cwd=tmp_path))
    assert code == 1
    assert "line 2" in err
    assert "hint:" in err
    assert "starting" not in err
    assert not (tmp_path / "prompts.answers.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "nowhere.jsonl"), "nowhere.jsonl"),
        (("generate", "here.jsonl", "--model", "unheard-of"), "unheard-of"),
        (("generate", "here.jsonl", "--peers", "nowhere.toml"), "nowhere.toml"),
        (("generate", "here.jsonl", "--split", "10,x"), "10,x"),
        (("generate", "here.jsonl", "--nodes", "a,b"), "--nodes"),
        (("node", "--peers", "nowhere.toml"), "nowhere.toml"),
        (("top", "--peers", "nowhere.toml"), "nowhere.toml"),
        (("generate", "here.jsonl", "--trace", "nowhere/t.json"), "nowhere/t.json"),
        (("generate", "here.jsonl", "--trace", "t.json", "--coordinator", "stage"), "leave out --trace"),
        (("generate", "here.jsonl", "--draft-model", "unheard-of"), "unheard-of"),
        (("certs", "new", "No Name"), "No Name"),
        (("model", "get", "unheard-of"), "unheard-of"),
    ],
)
def test_a_wrong_flag_or_file_is_a_sentence_and_never_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    write_prompts(tmp_path / "here.jsonl", [{"prompt": "a"}])
    code, _, err = finished(bbquic(*arguments, cwd=tmp_path))
    assert code in (1, 2)
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err


def wait_for_answers(process: subprocess.Popen[str], answers: Path, count: int) -> None:
    """Until so many answers are on disk: the run's own plain view is what it waits on, line by line."""
    assert process.stderr is not None
    for _ in process.stderr:
        if answers.exists() and answers.read_bytes().count(b"\n") >= count:
            return
    raise AssertionError(f"the run ended before it had {count} answers")


LONG = [{"prompt": f"some what {n}", "max_tokens": 400 if n % 2 else 3} for n in range(24)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_half_way_is_completed_by_the_same_command(
    tiny: Path, tmp_path: Path, how: signal.Signals
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", LONG)
    answers = tmp_path / "prompts.answers.jsonl"
    arguments = ("generate", prompts, "--model", tiny, "--nodes", "1", "--batch", "4")
    process = bbquic(*arguments, cwd=tmp_path)
    wait_for_answers(process, answers, 4)
    process.send_signal(how)
    _, err = process.communicate(timeout=DEADLINE)
    if how is not signal.SIGKILL:
        assert process.returncode == 130
        assert "run the same command again" in err
        assert "Traceback" not in err
    before = answers.read_bytes().count(b"\n")
    assert 4 <= before < len(LONG)
    with answers.open("ab") as file:
        file.write(b'{"id": "line-24", "line": 24, "te')  # what a crash in the middle of a write leaves
    code, _, err = finished(bbquic(*arguments, cwd=tmp_path))
    assert code == 0, err
    assert f"{before} had their record before" in err
    assert set(read_answers(answers)) == set(range(1, len(LONG) + 1))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder to live in, and an end to every node started from it."""
    yield tmp_path
    for pid_file in tmp_path.glob("*.pid"):
        pid = int(pid_file.read_text())
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def start_node(home: Path, name: str, peers: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    """A node as a user starts it, once it says where it listens."""
    process = bbquic("node", "--peers", peers, "--key", home / f"{name}.key", *more, cwd=home)
    (home / f"{name}.pid").write_text(str(process.pid))
    assert process.stdout is not None
    return process, process.stdout.readline()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def test_a_cluster_of_keys_made_by_hand_answers_and_refuses_a_stranger(tiny: Path, home: Path) -> None:
    names = ["home-a", "home-b", "cloud-c", "laptop", "guest", "stranger"]
    entries = {}
    for name, port in zip(names, free_ports(len(names)), strict=True):
        arguments: list[str | Path] = ["certs", "new", name, "--dir", home, "--address", f"127.0.0.1:{port}"]
        rights = ["--may", "coordinate"] if name in ("laptop", "stranger") else []
        code, entries[name], err = finished(bbquic(*arguments, *rights, cwd=home))
        assert code == 0, err
    peers, others = home / "peers.toml", home / "others.toml"
    peers.write_text("\n".join(entry for name, entry in entries.items() if name != "stranger"))
    others.write_text("\n".join(entries.values()))
    nodes = {}
    for name in names[:3]:
        nodes[name], line = start_node(home, name, peers, "--model", str(tiny), "--threads", "1")
        assert line.startswith(f"{name} listens on")
        assert "sha256:" in line
    prompts = write_prompts(
        home / "prompts.jsonl", [{"prompt": f"the {n}", "max_tokens": 6} for n in range(6)]
    )
    run = ("generate", prompts, "--model", tiny, "--nodes", "home-a,home-b,cloud-c")

    code, _, err = finished(bbquic(*run, "--peers", peers, "--key", home / "laptop.key", cwd=home))
    assert code == 0, err
    assert len(read_answers(home / "prompts.answers.jsonl")) == 6

    code, _, err = finished(bbquic(*run, "--peers", peers, "--key", home / "guest.key", cwd=home))
    assert code == 2
    assert "guest may not coordinate" in err

    code, _, err = finished(bbquic(*run, "--peers", others, "--key", home / "stranger.key", cwd=home))
    assert code == 1
    assert "not pinned" in err

    top = ("top", "--peers", peers, "--key", home / "guest.key")
    code, out, err = finished(bbquic(*top, "--once", cwd=home))
    assert code == 3, err  # laptop and guest have an address, and no node
    names_of_fields, *fields = (line.split("\t") for line in out.splitlines())
    watched = {row[0]: dict(zip(names_of_fields, row, strict=True)) for row in fields}
    assert [watched[name]["state"] for name in names[:3]] == ["up"] * 3
    assert [watched[name]["activity"] for name in names[:3]] == ["idle"] * 3
    assert all("±" in watched[name]["clock"] for name in names[:3])
    assert watched["laptop"]["state"].startswith("down: ")

    watching = bbquic(*top, cwd=home)
    assert watching.stderr is not None
    assert watching.stderr.readline().startswith("node\tstate")
    watching.send_signal(signal.SIGINT)
    code, _, err = finished(watching)
    assert code == 0
    assert "Traceback" not in err

    for process in nodes.values():
        process.send_signal(signal.SIGTERM)
    logs = {name: finished(process)[2] for name, process in nodes.items()}
    assert any("not pinned in peers.toml" in log for log in logs.values())
    assert all(process.returncode == 0 for process in nodes.values())
