"""A run that ends at any byte, and the run after it, leave one record for each line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbquic.errors import JobError
from bbquic.runtime.answers import Answer, AnswersFile, Outcome, encode_outcome
from bbquic.runtime.lines import short_sha
from bbquic.runtime.record import BadRecord
from bbquic.runtime.resume import DoneLines

MODEL = "tiny@0/float32"

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
texts = st.text(st.characters(codec=None), max_size=12)


@st.composite
def jobs(draw: st.DrawFn) -> list[Outcome]:
    """What becomes of a few lines, in the order in which they finish."""
    outcomes: list[Outcome] = []
    for line in draw(st.lists(st.integers(1, 5000), unique=True, max_size=6)):
        sha = short_sha(str(line).encode())
        if draw(st.booleans()):
            seed = draw(st.none() | st.integers(0, 2**64 - 1))
            outcomes.append(Answer(line, draw(texts), sha, draw(texts), 1, 2, "length", seed))
        else:
            outcomes.append(BadRecord(line, draw(st.none() | texts), sha, "invalid_json", draw(texts)))
    return outcomes


def finish(path: Path, outcomes: list[Outcome]) -> list[int]:
    """Run the job to its end, a record at a time; gives the lines that were still missing."""
    missing = []
    with AnswersFile.open(path, model=MODEL) as answers:
        for outcome in outcomes:
            if not answers.check_line(outcome.line, outcome.input_sha):
                answers.append([outcome])
                missing.append(outcome.line)
    return missing


@relaxed
@given(jobs(), st.data())
def test_a_file_cut_at_any_byte_resumes_to_one_record_a_line(
    outcomes: list[Outcome], data: st.DataObject
) -> None:
    records = [encode_outcome(outcome, MODEL) for outcome in outcomes]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.jsonl"
        path.write_bytes(whole[:cut])
        missing = finish(path, outcomes)
        assert path.read_bytes() == whole  # records finish in the same order here, so the bytes agree
    ends = [sum(map(len, records[: index + 1])) for index in range(len(records))]
    lost = [outcome.line for outcome, end in zip(outcomes, ends, strict=True) if cut < end - 1]
    assert missing == lost  # no record that was complete, with or without its newline, is done again


def test_every_cut_of_one_file_resumes(tmp_path: Path) -> None:
    outcomes: list[Outcome] = [
        Answer(2, "zwei", short_sha(b"2"), 'quoted "text"\n', 1, 2, "stop", 5),
        BadRecord(1, None, short_sha(b"1"), "empty_line", "the line is empty"),
        Answer(3, "drei", short_sha(b"3"), "日本語 😀", 1, 2, "length", None),
    ]
    whole = b"".join(encode_outcome(outcome, MODEL) for outcome in outcomes)
    path = tmp_path / "answers.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        finish(path, outcomes)
        assert path.read_bytes() == whole, cut


@relaxed
@given(st.binary(max_size=60))
def test_any_bytes_in_the_file_are_taken_refused_or_cut_and_nothing_else(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.jsonl"
        path.write_bytes(content)
        try:
            AnswersFile.open(path, model=MODEL).close()
        except JobError:
            assert path.read_bytes() == content
        else:
            assert content.startswith(path.read_bytes())


_APPEND_FOR_EVER = """
import sys
from pathlib import Path
from bbquic.runtime.answers import Answer, AnswersFile
answers = AnswersFile.open(Path(sys.argv[1]), model="tiny@0/float32")
for line in range(1, 1 << 20):
    answers.append([Answer(line, str(line), f"{line:016x}", "x" * 1000, 1, 2, "length", None)])
    print(line, flush=True)
"""


def test_what_was_reported_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    command: list[str | Path] = [sys.executable, "-c", _APPEND_FOR_EVER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        reported = 20 + len(process.stdout.read().splitlines())
    with AnswersFile.open(path, model=MODEL) as answers:
        assert all(answers.check_line(line, f"{line:016x}") for line in range(1, reported + 1))
        assert answers.answered_before in (reported, reported + 1)  # kept, and killed before saying so


@given(st.dictionaries(st.integers(1, 1 << 40), st.integers(0, 2**64 - 1), max_size=30))
def test_done_lines_remember_each_line_and_no_other(shas: dict[int, int]) -> None:
    done = DoneLines()
    for line, sha in shas.items():
        done.add(line, f"{sha:016x}")
    assert len(done) == len(shas)
    assert done.last == max(shas, default=0)
    assert all(line in done and done.matches(line, f"{sha:016x}") for line, sha in shas.items())
    assert all(line + 1 in shas or line + 1 not in done for line in shas)
    assert not any(done.matches(line, f"{sha ^ (1 << 63):016x}") for line, sha in shas.items())


def test_done_lines_refuse_a_line_twice() -> None:
    done = DoneLines()
    done.add(3, "0" * 16)
    with pytest.raises(ValueError, match="line 3"):
        done.add(3, "1" * 16)


def test_an_open_file_is_not_inherited_by_the_processes_that_a_run_starts(tmp_path: Path) -> None:
    with AnswersFile.open(tmp_path / "answers.jsonl", model=MODEL):
        listed = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False
        )
    assert os.fspath(tmp_path) not in listed.stdout
