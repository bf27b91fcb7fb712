"""Whatever a line's bytes are, it gives one record, good or bad, and nothing is raised."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbquic.runtime.job import JobFile
from bbquic.runtime.lines import short_sha
from bbquic.runtime.record import BadRecord, Defaults, Record, parse_record

VALID = [
    b'{"id": "a", "prompt": "Hi", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1}',
    b'{"messages": [{"role": "system", "content": "Hm"}, {"role": "user", "content": "Hi"}], "stop": ["a"]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\u00e9\xc3\xa9"}]}], "n": 1}',
    b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hi"}}',
]
FIELDS = [
    "id", "custom_id", "body", "url", "method", "prompt", "messages", "role", "content", "type", "text",
    "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs",
    "tools", "x",
]  # fmt: skip

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "text"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


def parse(raw: bytes) -> Record | BadRecord:
    """Parse, and hold the result to what every record promises."""
    record = parse_record(1, raw, short_sha(raw), Defaults())
    assert isinstance(record, Record | BadRecord)
    if isinstance(record, Record):
        assert (record.prompt is None) != (record.messages is None)
        assert record.prompt != ""
        assert record.messages != ()
        assert record.max_tokens >= 1
        assert 0 <= record.sampling.temperature <= 2
        for text in (
            record.id,
            record.prompt or "",
            *record.stop,
            *(m.content for m in record.messages or ()),
        ):
            text.encode("utf-8")
    else:
        assert record.code
        assert record.message
        record.message.encode("utf-8")
    return record


@relaxed
@given(st.binary())
def test_any_bytes_give_one_record(raw: bytes) -> None:
    parse(raw)


@relaxed
@given(st.dictionaries(st.sampled_from(FIELDS), values))
def test_any_object_of_known_fields_gives_one_record(members: dict[str, Any]) -> None:
    parse(json.dumps(members).encode())


@relaxed
@given(values)
def test_any_json_gives_one_record(value: object) -> None:
    parse(json.dumps(value).encode())


@relaxed
@given(st.sampled_from(VALID), st.data())
def test_a_valid_line_with_one_byte_changed_gives_one_record(raw: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(raw) - 1))
    byte = data.draw(st.integers(0, 255))
    parse(raw[:at] + bytes([byte]) + raw[at + 1 :])


@relaxed
@given(st.sampled_from(VALID), st.data())
def test_a_valid_line_cut_anywhere_is_refused(raw: bytes, data: st.DataObject) -> None:
    assert isinstance(parse(raw), Record)
    assert isinstance(parse(raw[: data.draw(st.integers(0, len(raw) - 1))]), BadRecord)


@relaxed
@given(st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"")), max_size=8), st.booleans())
def test_a_file_of_any_lines_gives_one_record_a_line(lines: list[bytes], ended: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines) if ended else b"\n".join(lines))
        records = list(JobFile(path, max_line=20))
        expected = lines if ended or (lines and lines[-1]) else lines[:-1]
        assert [record.line for record in records] == list(range(1, len(expected) + 1))
        assert [record.input_sha for record in records] == [short_sha(line) for line in expected]
        assert JobFile(path).count() == len(expected)
