from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from bbquic.errors import ModelError, RecordError
from bbquic.model.directory import ModelDirectory
from bbquic.model.tokenizer import StreamDecoder, Tokenizer

TEXTS = [
    "",
    " ",
    "\n\n\t  leading and trailing \r\n ",
    "The quick brown fox jumps over the lazy dog.",
    "1234567 + 89 = 3.14159e-10",
    "Ünïcödé, naïve café, Straße; déjà vu",
    "漢字とかな、한국어, العربية, हिन्दी, ไทย, Ελληνικά, Русский",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\ufeff \u202eabc",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # ok\n",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "\x00\x01\x7f\x85\u2028\ufffd",
    "a" * 500,
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Why is the sky blue?\n"}],
    [
        {"role": "user", "content": "漢字 & <b>html</b> \"quotes\" 'single'"},
        {"role": "assistant", "content": "yes 👍"},
        {"role": "user", "content": "", "name": None},
    ],
]


def check_against_transformers(directory: Path) -> None:
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == theirs(text).input_ids
        assert ours.decode(tokens) == theirs.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    for chat in CHATS:
        tokens = ours.encode_chat(chat)
        assert tokens == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.eos_token_id == theirs.eos_token_id


def test_a_tokenizer_does_what_transformers_does(tiny: Path) -> None:
    check_against_transformers(tiny)


@pytest.mark.real_model
def test_the_default_tokenizer_does_what_transformers_does(default_model: ModelDirectory) -> None:
    check_against_transformers(default_model.path)


def with_settings(tiny: Path, directory: Path, **changes: Any) -> Path:
    """A copy of the tiny model's tokenizer with other entries in tokenizer_config.json."""
    directory.mkdir()
    shutil.copy(tiny / "tokenizer.json", directory)
    values = json.loads((tiny / "tokenizer_config.json").read_text()) | changes
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def test_a_bos_of_the_tokenizer_is_kept_in_text_and_not_doubled_in_chat(tiny: Path, tmp_path: Path) -> None:
    directory = with_settings(
        tiny, tmp_path / "bos", chat_template="{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    )
    tokenizer = HFTokenizer.from_file(str(tiny / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(directory / "tokenizer.json"))
    ours = Tokenizer(directory)
    assert ours.encode("the of") == [1, *Tokenizer(tiny).encode("the of")]
    assert ours.encode("the of" * 50)[1:] == Tokenizer(tiny).encode("the of" * 50)
    assert ours.encode_chat([{"role": "user", "content": "x"}]) == [1, *Tokenizer(tiny).encode("x"), 2]


CLEVER_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {{- message | tojson }}
    {% generation %}{{ message['content'] | trim }}{% endgeneration %}
{%- endfor %}
{%- if tools is none and documents is none and add_generation_prompt %}{{ pad_token }}{% endif -%}
"""


def test_templates_have_the_tools_that_transformers_gives_them(tiny: Path, tmp_path: Path) -> None:
    directory = with_settings(tiny, tmp_path / "clever", chat_template=CLEVER_TEMPLATE)
    chat = [*CHATS[2], {"role": "skip", "content": "unseen"}]
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert Tokenizer(directory).encode_chat(chat) == expected


def test_a_template_may_be_a_file_or_one_of_several(tiny: Path, tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "the"}]
    named = with_settings(tiny, tmp_path / "named", chat_template=several)
    assert Tokenizer(named).encode_chat(CHATS[0]) == Tokenizer(tiny).encode("the")
    (named / "chat_template.jinja").write_text(" of", encoding="utf-8")
    assert Tokenizer(named).encode_chat(CHATS[0]) == Tokenizer(tiny).encode(" of")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_a_template_that_fails_costs_its_record_alone(tiny: Path, tmp_path: Path, template: str) -> None:
    directory = with_settings(tiny, tmp_path / "bad", chat_template=template)
    with pytest.raises(RecordError) as caught:
        Tokenizer(directory).encode_chat(CHATS[0])
    assert caught.value.code == "chat_template"


def test_a_model_without_a_template_refuses_messages_by_name(tiny: Path, tmp_path: Path) -> None:
    directory = with_settings(tiny, tmp_path / "base", chat_template=None)
    with pytest.raises(RecordError) as caught:
        Tokenizer(directory).encode_chat(CHATS[0])
    assert caught.value.code == "no_chat_template"


def test_a_template_that_is_no_template_is_an_error_of_the_model(tiny: Path, tmp_path: Path) -> None:
    directory = with_settings(tiny, tmp_path / "bad", chat_template="{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer(directory).encode_chat(CHATS[0])


def test_half_a_surrogate_pair_is_an_error_of_the_record(tiny: Path) -> None:
    with pytest.raises(RecordError) as caught:
        Tokenizer(tiny).encode("a\ud800b")
    assert caught.value.code == "invalid_utf8"


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path)


def stream(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in tokens), decoder.finish()]


@settings(max_examples=300)
@given(st.data())
def test_a_stream_joins_to_the_text_of_all_its_tokens(tiny: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer(tiny)
    tokens = data.draw(st.lists(st.integers(0, 340), max_size=60))  # 320 and on are unknown
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_a_stream_never_shows_half_a_character(tiny: Path, text: str) -> None:
    tokenizer = Tokenizer(tiny)
    shown = ""
    for piece in stream(tokenizer, tokenizer.encode(text)):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_a_character_is_shown_with_its_last_byte(tiny: Path) -> None:
    tokenizer = Tokenizer(tiny)
    tokens = tokenizer.encode("é漢👍")  # two, three and four bytes, a token each
    assert stream(tokenizer, tokens) == ["", "é", "", "", "漢", "", "", "", "👍", ""]
    assert stream(tokenizer, tokens[:-1])[-2:] == ["", "\ufffd"]


@pytest.mark.real_model
@settings(max_examples=100)
@given(st.lists(st.integers(0, 49151), max_size=50))
def test_a_stream_of_the_default_model_joins_to_its_text(
    default_model: ModelDirectory, tokens: list[int]
) -> None:
    assert "".join(stream(default_model.tokenizer, tokens)) == default_model.tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """In the manner of Llama 2: words with a leading '▁', bytes as tokens of their own."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "é"]
    tokenizer = HFTokenizer(
        models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=[("▁", "a")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@settings(max_examples=500)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 270), st.integers(256, 264), st.sampled_from([3 + 0xC3, 3 + 0xA9, 3 + 0xE6])
        ),
        max_size=30,
    )
)
def test_a_stream_of_byte_fallback_joins_to_its_text(sentencepiece: Tokenizer, tokens: list[int]) -> None:
    assert "".join(stream(sentencepiece, tokens)) == sentencepiece.decode(tokens)
