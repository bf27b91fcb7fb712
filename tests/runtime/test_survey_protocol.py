"""MEASURE, PROFILE, SURVEY and LINKS: what their headers refuse."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbquic.errors import RemoteProtocolError
from bbquic.runtime.profile import WireProfile
from bbquic.runtime.protocol import (
    LinkFigures,
    LinksHeader,
    MeasureHeader,
    ProfileHeader,
    SurveyHeader,
)
from bbquic.transport.message import decode_header_untrusted, encode_header

PROFILE = WireProfile(
    mlp=((1.0, 1e-3), (16.0, 2e-3)),
    attention=(1e-5, 2e-6, 3e-8),
    embed=((1.0, 1e-5),),
    head=((1.0, 1e-3),),
    memory=10**9,
    overhead=1e-4,
    to_host=1e10,
    codecs={"H8": (0.84, 1e-9, 1e-9)},
)
LINK = LinkFigures("b", 12.5e6, False, 0.02, 0.001, 3.5, None)
VALID: list[msgspec.Struct] = [
    MeasureHeader("m", {"hidden_size": "64", "model_type": '"llama"'}, "float32", True),
    ProfileHeader("m", "float32", PROFILE, None),
    ProfileHeader("m", "float32", None, "busy with job 0"),
    SurveyHeader(7, ("b", "c", "command"), ("c",)),
    LinksHeader(7, (LINK, LinkFigures("c", trouble="it does not answer"))),
]


@pytest.mark.parametrize("header", VALID, ids=lambda header: type(header).__name__)
def test_a_header_is_read_as_it_was_written(header: msgspec.Struct) -> None:
    assert decode_header_untrusted(type(header), encode_header(header)) == header


@settings(max_examples=300)
@given(st.sampled_from(VALID), st.data())
def test_one_changed_byte_gives_a_header_or_a_refusal(header: msgspec.Struct, data: st.DataObject) -> None:
    changed = bytearray(encode_header(header))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        found = decode_header_untrusted(type(header), bytes(changed))
        if isinstance(found, ProfileHeader) and found.profile is not None:
            found.profile.plain("a")  # whatever is read is a profile


def bad(header: msgspec.Struct, **changes: Any) -> tuple[type[msgspec.Struct], bytes]:
    """The header with some fields changed, as whoever does not check them would send it."""
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    return type(header), msgspec.msgpack.encode({**fields, **changes})


def with_profile(**changes: Any) -> tuple[type[msgspec.Struct], bytes]:
    return bad(VALID[1], profile={**msgspec.to_builtins(PROFILE), **changes})


def with_link(**changes: Any) -> tuple[type[msgspec.Struct], bytes]:
    return bad(VALID[4], links=[{**msgspec.to_builtins(LINK), **changes}])


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        bad(VALID[0], config={}),
        bad(VALID[0], config={str(n): "1" for n in range(257)}),
        bad(VALID[0], config={"a": 1}),
        bad(VALID[0], config={"a": "x" * 40_000}),
        bad(VALID[0], fresh=1),
        bad(VALID[1], trouble="and trouble"),
        bad(VALID[1], profile=None),
        bad(VALID[1], more=1),
        with_profile(mlp=[]),
        with_profile(mlp=[[1.0, 1e-3], [1.0, 2e-3]]),
        with_profile(mlp=[[float(n), 1.0] for n in range(65)]),
        with_profile(head=[[1.0, NAN]]),
        with_profile(head=[[1.0, -1.0]]),
        with_profile(embed=[[INFINITE, 1.0]]),
        with_profile(attention=[0.0, 0.0]),
        with_profile(attention=[0.0, 0.0, INFINITE]),
        with_profile(memory=-1),
        with_profile(memory=2**63),
        with_profile(overhead=NAN),
        with_profile(to_host=0.0),
        with_profile(to_host=NAN),
        with_profile(codecs={"P": [0.5, 0.0, 0.0]}),
        with_profile(codecs={"H8": [0.5, -1e-9, 0.0]}),
        with_profile(codecs={"H8": [NAN, 0.0, 0.0]}),
        bad(VALID[3], peers=[]),
        bad(VALID[3], peers=["b"] * 2, probe=[]),
        bad(VALID[3], peers=[f"n{n}" for n in range(257)], probe=[]),
        bad(VALID[3], probe=["d"]),
        bad(VALID[3], number=-1),
        bad(VALID[4], links=[msgspec.to_builtins(LINK)] * 257),
        with_link(peer=""),
        with_link(rate=0.0),
        with_link(rate=NAN),
        with_link(rate=INFINITE),
        with_link(min_rtt=-0.001),
        with_link(min_rtt=NAN),
        with_link(loss=1.5),
        with_link(age=NAN),
        with_link(trouble="x" * 513),
    ],
)
def test_a_figure_out_of_its_bounds_is_refused(kind: type[msgspec.Struct], header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"not a {kind.__name__}"):
        decode_header_untrusted(kind, header)


def test_the_largest_answer_fits_its_message() -> None:
    from bbquic.runtime.protocol import MAX_STAGES
    from bbquic.transport.message import RULES, Kind

    worst = LinkFigures("n" * 63, 1e12, True, 1e3, 1.0, 1e12, "x" * 512)
    assert len(encode_header(LinksHeader(2**40, (worst,) * MAX_STAGES))) <= RULES[Kind.LINKS].header
    assert json.loads(msgspec.json.encode(worst))["peer"] == "n" * 63
