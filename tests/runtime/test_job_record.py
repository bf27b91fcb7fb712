"""One line of the prompts file: what it may say, and what becomes of one that says anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bbquic.errors import RecordError
from bbquic.runtime.record import BadRecord, Defaults, Message, Record, parse_record

SHA = "0123456789abcdef"


def parse(raw: bytes, defaults: Defaults | None = None) -> Record | BadRecord:
    return parse_record(7, raw, SHA, defaults or Defaults())


def good(members: dict[str, Any], defaults: Defaults | None = None) -> Record:
    record = parse(json.dumps(members).encode(), defaults)
    assert isinstance(record, Record), record
    return record


def refused(line: dict[str, Any] | list[Any] | bytes, code: str, *words: str) -> BadRecord:
    record = parse(line if isinstance(line, bytes) else json.dumps(line).encode())
    assert isinstance(record, BadRecord), record
    assert record.code == code
    assert (record.line, record.input_sha) == (7, SHA)
    for word in words:
        assert word in record.message
    return record


def chat(content: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def batch(body: dict[str, Any], **envelope: object) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body, **envelope}


# What a line may leave out


def test_a_prompt_alone_is_a_record_greedy_and_with_the_default_length() -> None:
    record = good({"prompt": "Hi"})
    assert (record.prompt, record.messages, record.max_tokens, record.stop) == ("Hi", None, 256, ())
    assert (record.sampling.temperature, record.sampling.seed, record.seed_given) == (0.0, 0, False)


def test_defaults_fill_what_a_line_leaves_out() -> None:
    defaults = Defaults(max_tokens=9, temperature=0.5, top_p=0.8, top_k=3, draw_seed=lambda: 11)
    record = good({"prompt": "Hi"}, defaults)
    assert record.max_tokens == 9
    sampling = record.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.8, 3, 11)


def test_a_line_overrules_the_defaults() -> None:
    defaults = Defaults(max_tokens=9, temperature=0.5, top_p=0.8, top_k=3)
    line = {"prompt": "Hi", "max_tokens": 2, "temperature": 0, "top_p": 1, "top_k": 0, "seed": 5}
    record = good(line, defaults)
    sampling = record.sampling
    assert record.max_tokens == 2
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 1.0, 0, 5)


def test_a_null_counts_as_left_out() -> None:
    record = good(
        {"prompt": "Hi", "id": None, "messages": None, "max_tokens": None, "seed": None, "stop": None}
    )
    assert (record.id, record.max_tokens, record.seed_given) == ("line-7", 256, False)


def test_a_sampled_record_without_a_seed_draws_one() -> None:
    record = good({"prompt": "Hi", "temperature": 1}, Defaults(draw_seed=lambda: 42))
    assert (record.sampling.seed, record.seed_given) == (42, False)


def test_drawn_seeds_differ_and_survive_readers_that_keep_numbers_as_doubles() -> None:
    seeds = {good({"prompt": "Hi", "temperature": 1}).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(int(float(seed)) == seed for seed in seeds)


def test_a_seed_that_is_given_is_kept_to_its_last_bit() -> None:
    record = good({"prompt": "Hi", "temperature": 1, "seed": 2**64 - 1})
    assert (record.sampling.seed, record.seed_given) == (2**64 - 1, True)


def test_a_record_that_fails_later_keeps_its_line_id_and_input() -> None:
    bad = good({"prompt": "Hi", "id": "a"}).refused(RecordError("prompt_too_long", "9000 tokens"))
    assert bad == BadRecord(7, "a", SHA, "prompt_too_long", "9000 tokens")


# Ids


def test_a_line_without_an_id_is_named_by_its_number() -> None:
    assert good({"prompt": "Hi"}).id == "line-7"


def test_an_integer_id_becomes_a_string() -> None:
    assert good({"prompt": "Hi", "id": 12}).id == "12"


@pytest.mark.parametrize("id", [True, 1.5, [], {}])
def test_an_id_of_another_type_is_refused(id: object) -> None:
    assert refused({"prompt": "Hi", "id": id}, "wrong_type", "id").id is None


def test_an_empty_id_is_refused() -> None:
    refused({"prompt": "Hi", "id": ""}, "out_of_range", "id")


def test_an_id_of_thousands_of_characters_is_refused() -> None:
    refused({"prompt": "Hi", "id": "x" * 513}, "out_of_range", "id", "512")


def test_a_refused_line_keeps_its_id() -> None:
    assert refused({"id": "a", "prompt": ""}, "empty_prompt").id == "a"


# Prompts


def test_an_empty_prompt_is_refused() -> None:
    refused({"prompt": ""}, "empty_prompt", "prompt")


def test_a_prompt_of_white_space_is_a_prompt() -> None:
    assert good({"prompt": " \n"}).prompt == " \n"


def test_a_line_without_a_prompt_is_refused() -> None:
    refused({"id": "a"}, "missing_prompt", "prompt", "messages")


def test_a_prompt_beside_messages_is_refused() -> None:
    refused({"prompt": "Hi", **chat("Hi")}, "conflicting_fields", "prompt", "messages")


@pytest.mark.parametrize("prompt", [1, True, ["a", "b"], [1, 2], {}])
def test_a_prompt_of_another_type_is_refused(prompt: object) -> None:
    refused({"prompt": prompt}, "wrong_type", "prompt")


def test_half_of_a_surrogate_pair_is_refused() -> None:
    refused(rb'{"prompt": "a\ud83d"}', "invalid_utf8", "prompt", "character 2")


def test_two_halves_of_a_surrogate_pair_are_their_character() -> None:
    record = parse(rb'{"prompt": "\ud83d\ude00"}')
    assert isinstance(record, Record)
    assert record.prompt == "😀"


# Messages


def test_messages_keep_their_order_and_roles() -> None:
    roles = ("system", "user", "assistant", "user")
    turns = good({"messages": [{"role": role, "content": role.upper()} for role in roles]}).messages
    assert turns is not None
    assert [(turn.role, turn.content) for turn in turns] == [(role, role.upper()) for role in roles]


def test_a_developer_message_is_a_system_message() -> None:
    assert good(chat("Be brief.", "developer")).messages == (Message("system", "Be brief."),)


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert good(chat(parts)).messages == (Message("user", "Hello there"),)


def test_an_image_in_a_message_is_refused_by_its_place() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    refused(chat(parts), "unsupported_field", "messages[0].content[1]", "image_url")


def test_a_tool_message_is_refused() -> None:
    refused(chat("42", "tool"), "unsupported_field", "messages[0].role", "tool")


def test_a_message_with_tool_calls_is_refused() -> None:
    line = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}
    refused(line, "unsupported_field", "messages[0].tool_calls")


def test_null_members_of_a_message_ask_for_nothing() -> None:
    line = {"messages": [{"role": "user", "content": "x", "name": None, "tool_calls": None, "refusal": None}]}
    assert good(line).messages == (Message("user", "x"),)


def test_a_message_without_a_role_is_refused() -> None:
    refused({"messages": [{"content": "x"}]}, "wrong_type", "messages[0].role")


@pytest.mark.parametrize("content", [None, 3, {}, ["text"]])
def test_a_message_whose_content_is_no_text_is_refused(content: object) -> None:
    refused(chat(content), "wrong_type", "messages[0].content")


@pytest.mark.parametrize("messages", ["Hi", {"role": "user"}, ["Hi"], 3])
def test_messages_that_are_no_list_of_objects_are_refused(messages: object) -> None:
    refused({"messages": messages}, "wrong_type", "messages")


def test_an_empty_conversation_is_refused() -> None:
    refused({"messages": []}, "empty_prompt")


def test_a_conversation_without_any_text_is_refused() -> None:
    refused(chat(""), "empty_prompt")


# Numbers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1 << 21),
        ("max_tokens", 10**100),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name(field: str, value: float) -> None:
    refused({"prompt": "Hi", field: value}, "out_of_range", field)


def test_a_number_beyond_a_double_is_refused() -> None:
    refused(b'{"prompt": "Hi", "temperature": 1e999}', "out_of_range", "temperature")


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed"])
@pytest.mark.parametrize("value", ["1", 1.5, True, [1], {}])
def test_a_whole_number_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    refused({"prompt": "Hi", field: value}, "wrong_type", field)


@pytest.mark.parametrize("field", ["temperature", "top_p"])
@pytest.mark.parametrize("value", ["1", True, [1], {}])
def test_a_number_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    refused({"prompt": "Hi", field: value}, "wrong_type", field)


# Stop strings


def test_a_stop_string_and_a_list_of_them_are_taken() -> None:
    assert good({"prompt": "Hi", "stop": "\n"}).stop == ("\n",)
    assert good({"prompt": "Hi", "stop": ["a", "b"]}).stop == ("a", "b")
    assert good({"prompt": "Hi", "stop": []}).stop == ()


def test_sixteen_stop_strings_are_taken_and_seventeen_refused() -> None:
    assert len(good({"prompt": "Hi", "stop": ["x"] * 16}).stop) == 16
    refused({"prompt": "Hi", "stop": ["x"] * 17}, "out_of_range", "stop", "16")


def test_an_empty_stop_string_is_refused() -> None:
    refused({"prompt": "Hi", "stop": ["a", ""]}, "out_of_range", "stop")


def test_a_stop_string_that_is_a_page_long_is_refused() -> None:
    refused({"prompt": "Hi", "stop": "x" * 1025}, "out_of_range", "stop")


@pytest.mark.parametrize("stop", [3, {}, [3], [None]])
def test_stops_of_another_type_are_refused(stop: object) -> None:
    refused({"prompt": "Hi", "stop": stop}, "wrong_type", "stop")


# Fields that are not honoured


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 2),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 5),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"50256": -100}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("stream", True),
        ("echo", True),
        ("suffix", "!"),
        ("reasoning_effort", "high"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(field: str, value: object) -> None:
    refused({"prompt": "Hi", field: value}, "unsupported_field", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("logit_bias", {}),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("stream", False),
        ("echo", False),
    ],
)
def test_a_field_that_is_not_honoured_may_ask_for_nothing(field: str, value: object) -> None:
    good({"prompt": "Hi", field: value})
    good({"prompt": "Hi", field: None})


@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_field_is_refused_even_when_null(value: object) -> None:
    refused({"prompt": "Hi", "temprature": value}, "unsupported_field", "temprature")


def test_a_model_in_our_own_form_is_refused() -> None:
    refused({"prompt": "Hi", "model": "gpt"}, "unsupported_field", "model")


def test_a_message_repeats_little_of_an_endless_field_name() -> None:
    assert len(refused({"prompt": "Hi", "x" * 10_000: 1}, "unsupported_field").message) < 120


# OpenAI's batch form


def test_a_batch_line_for_chat_is_a_record() -> None:
    body = {"model": "gpt", **chat("Hi"), "max_completion_tokens": 5, "user": "u", "n": 1, "stream": False}
    record = good(batch(body))
    assert (record.id, record.messages, record.max_tokens) == ("c", (Message("user", "Hi"),), 5)


def test_a_batch_line_for_completions_is_a_record() -> None:
    record = good(batch({"model": "gpt", "prompt": "Hi", "max_tokens": 5}, url="/v1/completions"))
    assert (record.prompt, record.max_tokens) == ("Hi", 5)


def test_a_batch_line_needs_neither_custom_id_nor_method_nor_url() -> None:
    assert good({"body": {"prompt": "Hi"}}).id == "line-7"


def test_a_batch_line_may_say_its_length_twice_if_it_says_the_same() -> None:
    same, other = ({**chat("Hi"), "max_tokens": 5, "max_completion_tokens": n} for n in (5, 6))
    assert good(batch(same)).max_tokens == 5
    refused(batch(other), "conflicting_fields", "max_tokens")


def test_max_completion_tokens_belongs_to_batch_lines_only() -> None:
    refused({"prompt": "Hi", "max_completion_tokens": 5}, "unsupported_field", "max_completion_tokens")


def test_a_batch_line_for_another_endpoint_is_refused() -> None:
    refused(batch({"input": "Hi"}, url="/v1/embeddings"), "unsupported_field", "url", "/v1/embeddings")


def test_a_batch_line_whose_body_does_not_suit_its_url_is_refused() -> None:
    refused(batch({"prompt": "Hi"}), "unsupported_field", "body.prompt")
    refused(batch(chat("Hi"), url="/v1/completions"), "unsupported_field", "body.messages")


def test_a_batch_line_with_another_method_is_refused() -> None:
    refused(batch(chat("Hi"), method="GET"), "unsupported_field", "method")


def test_a_batch_line_without_a_body_is_refused() -> None:
    refused({"custom_id": "c"}, "wrong_type", "body")


def test_an_unknown_field_around_or_in_a_body_is_refused() -> None:
    assert refused(batch(chat("Hi"), extra=1), "unsupported_field", "extra").id == "c"
    refused(batch({**chat("Hi"), "extra": 1}), "unsupported_field", "body.extra")


def test_an_id_beside_a_custom_id_is_refused() -> None:
    refused(batch(chat("Hi"), id="x"), "unsupported_field", "id")


# Lines that are no object at all


@pytest.mark.parametrize("raw", [b"", b"  \t", b"\r"])
def test_an_empty_line_is_refused(raw: bytes) -> None:
    refused(raw, "empty_line")


@pytest.mark.parametrize("raw", [b"{", b"Hi", b'{"prompt": "Hi"', b'{"prompt": "Hi"} x', b"{'prompt': 'Hi'}"])
def test_a_line_that_is_not_json_is_refused(raw: bytes) -> None:
    assert refused(raw, "invalid_json").id is None


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"Hi"', b"null", b"true"])
def test_json_that_is_no_object_is_refused(raw: bytes) -> None:
    refused(raw, "wrong_type", "object")


def test_bytes_that_are_not_utf8_are_refused() -> None:
    refused(b'{"prompt": "\xff"}', "invalid_utf8", "byte 13")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(number: bytes) -> None:
    refused(b'{"prompt": "Hi", "temperature": ' + number + b"}", "invalid_json", number.decode())


def test_a_number_of_ten_thousand_digits_is_refused() -> None:
    refused(b'{"prompt": "Hi", "seed": ' + b"9" * 10_000 + b"}", "invalid_json", "digits")


def test_a_key_that_stands_twice_is_refused_wherever_it_is() -> None:
    refused(b'{"prompt": "Hi", "prompt": "Ho"}', "invalid_json", "prompt", "twice")
    refused(b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "invalid_json", "role")


def test_json_nested_beyond_reason_is_refused() -> None:
    refused(b'{"prompt": ' + b"[" * 200_000, "invalid_json", "nested")
    refused(b'{"a":' * 100_000, "invalid_json", "nested")
