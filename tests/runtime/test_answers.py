"""The answers file: what is reported is on disk, and a rerun does only what is missing."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bbquic.errors import JobError
from bbquic.model.sampling import Sampling
from bbquic.runtime.answers import Answer, AnswersFile, AnswersStream, Outcome, encode_outcome, open_answers
from bbquic.runtime.record import BadRecord, Record
from bbquic.runtime.request import Completion

MODEL = "smollm2-135m@1a2b3c4d5e6f/float32"


def sha(line: int) -> str:
    return f"{line * 7:016x}"


def answer(line: int, text: str = "Well.", seed: int | None = None) -> Answer:
    return Answer(line, f"id-{line}", sha(line), text, 3, 2, "stop", seed)


def failure(line: int) -> BadRecord:
    return BadRecord(line, None, sha(line), "invalid_json", "the line is not JSON")


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")]


def altered(old: bytes, new: bytes) -> bytes:
    """A record of ours with one thing wrong in it."""
    record = encode_outcome(answer(1), MODEL).strip()
    assert old in record
    return record.replace(old, new)


def reopened(path: Path, model: str = MODEL) -> None:
    AnswersFile.open(path, model=model).close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


# What is written


def test_an_answer_has_its_fields_in_order(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
    (record,) = written(path)
    assert list(record.items()) == [
        ("id", "id-1"),
        ("line", 1),
        ("text", "Well."),
        ("prompt_tokens", 3),
        ("completion_tokens", 2),
        ("finish_reason", "stop"),
        ("model", MODEL),
        ("input", sha(1)),
    ]


def test_a_sampled_answer_reports_its_seed(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1, seed=0), answer(2, seed=2**64 - 1)])
    assert [record["seed"] for record in written(path)] == [0, 2**64 - 1]
    assert list(written(path)[0])[-3:] == ["model", "seed", "input"]


def test_an_error_record_has_its_fields_in_order(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([failure(4)])
    (record,) = written(path)
    error = {"code": "invalid_json", "message": "the line is not JSON"}
    assert list(record.items()) == [
        ("id", None),
        ("line", 4),
        ("error", error),
        ("model", MODEL),
        ("input", sha(4)),
    ]


def test_an_answer_is_made_of_its_record_and_completion() -> None:
    completion = Completion(5, (1, 2), "Well.", 3, "length")
    record = Record(5, "a", sha(5), "Hi", None, 9, Sampling(temperature=1.0, seed=6), False, ())
    assert Answer.of(record, 4, completion) == Answer(5, "a", sha(5), "Well.", 4, 3, "length", 6)
    greedy = Record(5, "a", sha(5), "Hi", None, 9, Sampling(seed=6), True, ())
    assert Answer.of(greedy, 4, completion).seed is None


def test_text_is_valid_utf8_whatever_it_holds() -> None:
    text = "\ud800 \udfff \ud83d\ude00 é \x00 \U0010ffff"
    line = encode_outcome(answer(1, text), MODEL)
    assert json.loads(line.decode("utf-8"))["text"] == "\ufffd \ufffd 😀 é \x00 \U0010ffff"


def test_text_never_breaks_a_line() -> None:
    text = "a\nb\rc\x85d\u2028e\u2029f\x0bg\x1ch"
    line = encode_outcome(answer(1, text), MODEL).decode("utf-8")
    assert len(line.splitlines()) == 1
    assert json.loads(line)["text"] == text


def test_an_empty_group_writes_nothing(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([])
    assert path.read_bytes() == b""


def test_a_line_never_gets_two_records(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        with pytest.raises(ValueError, match="two records"):
            answers.append([answer(2), failure(1)])
        with pytest.raises(ValueError, match="two records"):
            answers.append([answer(2), answer(2)])
    assert [record["line"] for record in written(path)] == [1]


# Resuming


def test_a_rerun_knows_the_lines_that_are_done_answered_or_failed(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(5), failure(2)])
        answers.append([answer(70_000)])
    with AnswersFile.open(path, model=MODEL) as answers:
        done = [line for line in (1, 2, 3, 5, 70_000, 70_001) if answers.check_line(line, sha(line))]
        assert done == [2, 5, 70_000]
        assert (answers.answered_before, answers.failed_before) == (2, 1)


def test_a_run_knows_the_lines_that_it_has_done_itself(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        assert not answers.check_line(1, sha(1))
        answers.append([answer(1)])
        assert answers.check_line(1, sha(1))


def test_a_prompt_that_changed_under_its_answer_is_refused(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        with pytest.raises(JobError, match="line 1 of the prompts was changed"):
            answers.check_line(1, sha(2))


def test_a_prompts_file_that_got_shorter_is_refused(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(9)])
        answers.check_end(9)
        with pytest.raises(JobError, match="answers line 9, and the prompts file ends at line 8"):
            answers.check_end(8)


def test_a_last_record_that_only_lacks_its_newline_is_kept(path: Path) -> None:
    whole = encode_outcome(answer(1), MODEL) + encode_outcome(answer(2), MODEL)
    path.write_bytes(whole[:-1])
    with AnswersFile.open(path, model=MODEL) as answers:
        assert answers.check_line(2, sha(2))
        answers.append([answer(3)])
    assert path.read_bytes() == whole + encode_outcome(answer(3), MODEL)


def test_a_torn_last_line_is_cut_off(path: Path) -> None:
    first = encode_outcome(answer(1), MODEL)
    path.write_bytes(first + encode_outcome(answer(2), MODEL)[:20])
    with AnswersFile.open(path, model=MODEL) as answers:
        assert not answers.check_line(2, sha(2))
    assert path.read_bytes() == first


@pytest.mark.parametrize("torn", [b"", b'{"id": "id-2", "li'])
def test_zeros_that_a_power_cut_leaves_are_cut_off(path: Path, torn: bytes) -> None:
    first = encode_outcome(answer(1), MODEL)
    path.write_bytes(first + torn + bytes(500))
    reopened(path)
    assert path.read_bytes() == first


def test_zeros_after_a_whole_record_cost_it_nothing(path: Path) -> None:
    first = encode_outcome(answer(1), MODEL)
    path.write_bytes(first[:-1] + bytes(500))
    reopened(path)
    assert path.read_bytes() == first


# Files that are not ours, or not this run's


@pytest.mark.parametrize(
    "line",
    [
        b"Dear diary,",
        b"",
        b'{"prompt": "Hi"}',
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        altered(b'"line": 1', b'"line": 0'),
        altered(b'"line": 1', b'"line": "1"'),
        altered(b'"text"', b'"words"'),
        altered(b'"input": "0', b'"input": "'),
        altered(b'"text": ', b'"error": {"code": "", "message": ""}, "text": '),
    ],
)
def test_a_line_that_is_not_ours_is_refused_and_nothing_is_changed(path: Path, line: bytes) -> None:
    content = encode_outcome(answer(3), MODEL) + line + b"\n" + encode_outcome(answer(2), MODEL)
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"line 2 of .*answers\.jsonl is not an answer"):
        reopened(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"My only notes", b'{"prompt": "Hi"}', b'{"id', b'{"idea": "'])
def test_a_file_of_someone_elses_is_never_cut(path: Path, content: bytes) -> None:
    path.write_bytes(content + b"!")
    with pytest.raises(JobError, match="line 1"):
        reopened(path)
    assert path.read_bytes() == content + b"!"


def test_a_whole_record_in_the_middle_that_was_damaged_is_refused(path: Path) -> None:
    first, second = (encode_outcome(answer(line), MODEL) for line in (1, 2))
    path.write_bytes(first[:30] + b"\n" + second)
    with pytest.raises(JobError, match="line 1"):
        reopened(path)


def test_answers_of_another_model_or_dtype_are_refused(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
    other = MODEL.replace("float32", "bfloat16")
    with pytest.raises(JobError, match=rf"{MODEL} .*and this run is {other}") as caught:
        reopened(path, other)
    assert caught.value.hint is not None
    assert "-o" in caught.value.hint


def test_a_line_that_is_answered_twice_is_refused(path: Path) -> None:
    path.write_bytes(encode_outcome(answer(1), MODEL) + encode_outcome(failure(1), MODEL))
    with pytest.raises(JobError, match="answers line 1 of the prompts twice"):
        reopened(path)


def test_a_second_run_on_the_same_answers_is_refused_until_the_first_ends(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        with pytest.raises(JobError, match=r"another run is writing its answers to .*answers\.jsonl"):
            reopened(path)
    reopened(path)


def test_a_second_process_on_the_same_answers_is_refused_until_the_first_is_killed(path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from bbquic.runtime.answers import AnswersFile;"
        f"answers = AnswersFile.open(Path(sys.argv[1]), model={MODEL!r});"
        "print('held', flush=True); sys.stdin.read()"
    )
    command: list[str | Path] = [sys.executable, "-c", hold, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(JobError, match="another run"):
            reopened(path)
        process.kill()
        process.wait()
    reopened(path)


@pytest.mark.parametrize("place", [".", "/dev/null"])
def test_what_is_no_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(JobError):
        reopened(tmp_path / place)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nowhere.*No such file or directory") as caught:
        reopened(tmp_path / "nowhere" / "answers.jsonl")
    assert caught.value.hint is not None
    assert "folder" in caught.value.hint


# Disks that fail


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to write beyond `size` bytes of any file: a real write, cut short, then EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own, where the tests may make one."""
    folder.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_write_that_the_system_cuts_short_is_taken_back_and_said_at_once(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        before = path.read_bytes()
        with largest_file(len(before) + 100), pytest.raises(JobError, match=os.strerror(errno.EFBIG)):
            answers.append([answer(2)])
        assert path.read_bytes() == before
        with pytest.raises(JobError, match="earlier write"):
            answers.append([answer(3)])
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(2)])
    assert [record["line"] for record in written(path)] == [1, 2]


def test_a_full_disk_is_said_at_once_and_the_rerun_goes_on(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as folder:
        path = folder / "answers.jsonl"
        with AnswersFile.open(path, model=MODEL) as answers:
            answers.append([answer(1)])
            with pytest.raises(JobError, match=rf"answers\.jsonl: {os.strerror(errno.ENOSPC)}") as caught:
                answers.append([answer(2, "x" * 100_000)])
            assert caught.value.hint is not None
            assert "make room" in caught.value.hint
        with AnswersFile.open(path, model=MODEL) as answers:
            assert not answers.check_line(2, sha(2))
            answers.append([answer(2)])
        assert [record["line"] for record in written(path)] == [1, 2]


def test_a_disk_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "still", "size=64k,ro") as folder,
        pytest.raises(JobError, match=os.strerror(errno.EROFS)),
    ):
        reopened(folder / "answers.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_cannot_be_written_is_said_at_once(path: Path) -> None:
    path.touch(0o444)
    with pytest.raises(JobError, match=os.strerror(errno.EACCES)):
        reopened(path)


# Files that change under the run


def test_a_file_that_was_deleted_meanwhile_is_noticed(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        path.unlink()
        with pytest.raises(JobError, match=r"answers\.jsonl: No such file"):
            answers.append([answer(2)])


def test_a_file_that_was_replaced_meanwhile_is_noticed_and_left_alone(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.replace(path)
        with pytest.raises(JobError, match="was replaced"):
            answers.append([answer(2)])
    assert [record["line"] for record in written(path)] == [1]


def test_a_file_that_someone_else_wrote_to_is_noticed(path: Path) -> None:
    with AnswersFile.open(path, model=MODEL) as answers:
        answers.append([answer(1)])
        with path.open("ab") as file:
            file.write(b"note to self\n")
        with pytest.raises(JobError, match="was changed by another program"):
            answers.append([answer(2)])


# Standard output


def test_answers_to_a_pipe_are_the_same_lines() -> None:
    outcomes: list[Outcome] = [answer(1), failure(2)]
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream:
        answers = AnswersStream(writer, model=MODEL)
        answers.append(outcomes)
        answers.close()
        os.close(writer)
        assert stream.read() == b"".join(encode_outcome(outcome, MODEL) for outcome in outcomes)


def test_answers_to_a_pipe_resume_nothing_and_never_repeat_a_line() -> None:
    reader, writer = os.pipe()
    answers = AnswersStream(writer, model=MODEL)
    answers.append([answer(1)])
    assert not answers.check_line(1, sha(1))
    with pytest.raises(ValueError, match="two records"):
        answers.append([answer(1)])
    os.close(reader)
    with pytest.raises(JobError, match="standard output: Broken pipe"):
        answers.append([answer(2)])
    os.close(writer)


def test_a_dash_means_standard_output() -> None:
    assert open_answers("-", model=MODEL).name == "standard output"


def test_answers_to_a_full_device_are_refused() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(JobError, match=os.strerror(errno.ENOSPC)):
            AnswersStream(fd, model=MODEL).append([answer(1)])
    finally:
        os.close(fd)
