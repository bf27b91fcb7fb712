"""The prompts file as a whole: one record a line, in flat memory."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from bbquic.errors import JobError
from bbquic.runtime.ids import UsedIds
from bbquic.runtime.job import JobFile
from bbquic.runtime.lines import short_sha
from bbquic.runtime.record import BadRecord, Record


def job(tmp_path: Path, content: bytes, *, max_line: int = 1 << 20) -> JobFile:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    return JobFile(path, max_line=max_line)


def codes(records: JobFile) -> list[str]:
    return [record.code if isinstance(record, BadRecord) else "ok" for record in records]


def test_every_line_gives_one_record_in_order(tmp_path: Path) -> None:
    records = list(job(tmp_path, b'{"prompt": "a"}\nnonsense\n{"prompt": "b"}\n'))
    assert [record.line for record in records] == [1, 2, 3]
    assert [type(record) for record in records] == [Record, BadRecord, Record]


def test_a_newline_at_the_end_starts_no_further_line(tmp_path: Path) -> None:
    assert codes(job(tmp_path, b'{"prompt": "a"}\n')) == codes(job(tmp_path, b'{"prompt": "a"}')) == ["ok"]


def test_an_empty_line_in_the_middle_is_an_error_record(tmp_path: Path) -> None:
    assert codes(job(tmp_path, b'{"prompt": "a"}\n\n{"prompt": "b"}')) == ["ok", "empty_line", "ok"]


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    assert codes(job(tmp_path, b"")) == []


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    assert codes(job(tmp_path, b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')) == ["ok", "ok"]


def test_a_byte_order_mark_is_tolerated_at_the_start_only(tmp_path: Path) -> None:
    line = b'\xef\xbb\xbf{"prompt": "a"}\n'
    assert codes(job(tmp_path, line + line)) == ["ok", "invalid_json"]


def test_a_file_in_utf16_is_error_records_throughout(tmp_path: Path) -> None:
    assert set(codes(job(tmp_path, '{"prompt": "ä"}\n{"prompt": "b"}'.encode("utf-16")))) <= {
        "invalid_utf8",
        "invalid_json",
    }


def test_a_record_remembers_the_hash_of_its_raw_line(tmp_path: Path) -> None:
    line = b'{"prompt": "a"}'
    first, second = job(tmp_path, line + b"\n" + line + b" ")
    assert first.input_sha == short_sha(line)
    assert second.input_sha == short_sha(line + b" ")


def test_a_line_above_the_limit_is_an_error_record_and_the_next_is_answered(tmp_path: Path) -> None:
    line = b'{"prompt": "' + b"a" * 100 + b'"}'
    records = job(tmp_path, line + b"\n" + b'{"prompt": "b"}\n', max_line=50)
    bad, good = records
    assert isinstance(bad, BadRecord)
    assert (bad.code, bad.id, bad.input_sha) == ("line_too_long", None, short_sha(line))
    assert (good.line, type(good)) == (2, Record)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_of_exactly_the_limit_is_taken(tmp_path: Path, end: bytes) -> None:
    line = b'{"prompt": "a"}'
    assert codes(job(tmp_path, line + end, max_line=len(line))) == ["ok"]
    assert codes(job(tmp_path, line + end, max_line=len(line) - 1)) == ["line_too_long"]


def test_a_line_above_the_limit_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with path.open("wb") as file:
        file.truncate(256 << 20)  # a sparse line of 256 MB without a newline
    tracemalloc.start()
    try:
        assert codes(JobFile(path, max_line=1 << 20)) == ["line_too_long"]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# Ids over the file


def test_the_later_of_two_lines_with_one_id_is_refused(tmp_path: Path) -> None:
    line = b'{"id": "a", "prompt": "x"}\n'
    first, second = job(tmp_path, line + line)
    assert isinstance(first, Record)
    assert isinstance(second, BadRecord)
    assert (second.code, second.id) == ("duplicate_id", "a")
    assert "line 1" in second.message


def test_an_integer_id_and_its_string_are_the_same_id(tmp_path: Path) -> None:
    content = b'{"id": 1, "prompt": "x"}\n{"id": "1", "prompt": "x"}\n'
    assert codes(job(tmp_path, content)) == ["ok", "duplicate_id"]


def test_a_line_without_an_id_can_clash_with_one_that_took_its_name(tmp_path: Path) -> None:
    content = b'{"id": "line-2", "prompt": "x"}\n{"prompt": "x"}\n{"prompt": "x"}\n'
    assert codes(job(tmp_path, content)) == ["ok", "duplicate_id", "ok"]


def test_an_id_may_be_the_name_of_its_own_line(tmp_path: Path) -> None:
    assert codes(job(tmp_path, b'{"id": "line-1", "prompt": "x"}\n{"prompt": "x"}')) == ["ok", "ok"]


def test_a_refused_line_claims_its_id_all_the_same(tmp_path: Path) -> None:
    content = b'{"id": "a", "prompt": ""}\n{"id": "a", "prompt": "x"}\n'
    assert codes(job(tmp_path, content)) == ["empty_prompt", "duplicate_id"]


def test_ids_of_batch_lines_and_of_our_own_share_one_space(tmp_path: Path) -> None:
    content = b'{"id": "a", "prompt": "x"}\n{"custom_id": "a", "body": {"prompt": "x"}}\n'
    assert codes(job(tmp_path, content)) == ["ok", "duplicate_id"]


def test_ids_that_no_utf8_can_hold_are_refused_line_by_line(tmp_path: Path) -> None:
    line = rb'{"id": "\ud800", "prompt": "x"}' + b"\n"
    assert codes(job(tmp_path, line + line)) == ["invalid_utf8", "invalid_utf8"]


def test_used_ids_find_the_first_line_of_each_through_growth() -> None:
    used = UsedIds()
    assert all(used.claim(f"id-{n}", n) is None for n in range(1, 20_001))
    assert all(used.claim(f"id-{n}", 30_000) == n for n in range(1, 20_001, 7))
    assert len(used) == 20_000


# Strictness, counting, and files that cannot be read


def test_strict_names_the_first_bad_lines_and_how_many_there_are(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"7 bad lines: line 1: .*invalid_json.*and 2 more") as caught:
        job(tmp_path, b"x\n" * 7).refuse_bad_lines()
    assert caught.value.hint


def test_strict_passes_a_file_without_bad_lines(tmp_path: Path) -> None:
    job(tmp_path, b'{"prompt": "a"}\n').refuse_bad_lines()


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\n\nb", b"\n", b"\n\n", b"a" * 3_000_000])
def test_counting_agrees_with_reading(tmp_path: Path, content: bytes) -> None:
    records = job(tmp_path, content)
    assert records.count() == len(list(records))


def test_a_missing_file_is_a_sentence_and_a_hint(tmp_path: Path) -> None:
    missing = JobFile(tmp_path / "nowhere.jsonl")
    with pytest.raises(JobError, match=r"nowhere\.jsonl: No such file") as caught:
        list(missing)
    assert caught.value.hint
    with pytest.raises(JobError):
        missing.count()


def test_a_folder_is_a_sentence_and_a_hint(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="Is a directory"):
        list(JobFile(tmp_path))


def test_the_prompts_that_come_with_the_project_are_all_good() -> None:
    root = Path(__file__).parents[2]
    counts = {"examples/prompts.jsonl": 12, "tests/data/prompts.jsonl": 40, "tests/data/sampled.jsonl": 8}
    for name, count in counts.items():
        records = JobFile(root / name)
        records.refuse_bad_lines()
        assert records.count() == count


_READ_ALL = """
import resource, sys
from pathlib import Path
from bbquic.runtime.job import JobFile

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
records = iter(JobFile(Path(sys.argv[1])))
next(records)  # there before the rest is read
before = peak()
print(sum(1 for _ in records), peak() - before)
"""


def test_a_hundred_thousand_lines_stream_in_flat_memory(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(f'{{"id": "record-{number}", "prompt": "{"Tell me more. " * 4}"}}\n')
    run = subprocess.run([sys.executable, "-c", _READ_ALL, path], capture_output=True, text=True, check=True)
    count, growth = map(int, run.stdout.split())
    assert count == 99_999
    assert growth < 16 << 10  # kB; the file has 9 MB and its records would have 80, the ids take up to 6
