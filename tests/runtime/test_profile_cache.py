"""Profiles as they travel and as they are kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import AttentionCost, CodecSpeed, Curve, NodeProfile
from bbquic.runtime.profile import WireProfile, shown
from bbquic.runtime.profile_cache import ProfileCache, ProfileKey
from bbquic.units import Bytes, BytesPerSecond, Seconds

KEY = ProfileKey.of("a device", 2, {"hidden_size": "64"}, "float32")
PROFILE = NodeProfile(
    name="a",
    mlp=Curve(((1.0, 1e-3), (16.0, 2e-3))),
    attention=AttentionCost(1e-5, 2e-6, 3e-8),
    embed=Curve(((1.0, 1e-5),)),
    head=Curve(((1.0, 1e-3),)),
    memory=Bytes(10**9),
    overhead=Seconds(1e-4),
    attention_host=AttentionCost(1e-4, 0.0, 1e-7),
    attention_prompt=AttentionCost(1e-5, 1e-6, 1e-8),
    host_memory=Bytes(10**10),
    offloads=True,
    to_host=BytesPerSecond(1e10),
    to_device=BytesPerSecond(2e10),
    codecs={Way.H8: CodecSpeed(0.8, 1e-9, 2e-9), Way.REC: CodecSpeed(0.7, 2e-9, 3e-9)},
    price=0.5,
)

seconds = st.floats(0, 1e6)
sizes = st.lists(st.floats(0, 2**40), min_size=1, max_size=9, unique=True).map(sorted)
curves = st.builds(
    lambda at, took: Curve(tuple(zip(at, took, strict=False))),
    sizes,
    st.lists(seconds, min_size=9, max_size=9),
)
attention = st.builds(AttentionCost, seconds, seconds, seconds)
profiles = st.builds(
    NodeProfile,
    name=st.just("a"),
    mlp=curves,
    attention=attention,
    embed=curves,
    head=curves,
    memory=st.integers(0, 2**60),
    overhead=seconds,
    attention_host=st.none() | attention,
    attention_prompt=st.none() | attention,
    host_memory=st.integers(0, 2**60),
    offloads=st.booleans(),
    host_beside=st.booleans(),
    to_host=st.none() | st.floats(1e-3, 1e15),
    to_device=st.none() | st.floats(1e-3, 1e15),
    codecs=st.dictionaries(
        st.sampled_from([Way.H8, Way.REC]), st.builds(CodecSpeed, st.floats(0, 4), seconds, seconds)
    ),
    price=st.just(0.5),
)


@given(profiles)
def test_a_profile_travels_and_is_kept_unchanged(profile: NodeProfile) -> None:
    wire = WireProfile.of(profile)
    for encoder, decoder in ((msgspec.msgpack, msgspec.msgpack), (msgspec.json, msgspec.json)):
        assert decoder.decode(encoder.encode(wire), type=WireProfile).plain("a", 0.5) == profile
    beside = (profile.attention_host if profile.offloads else None, profile.attention_prompt)
    assert len(shown(profile)) == 5 + len(profile.codecs) + sum(cost is not None for cost in beside)


def test_what_was_measured_is_found_again_by_all_that_it_depends_on(tmp_path: Path) -> None:
    cache, wire = ProfileCache(tmp_path / "profiles"), WireProfile.of(PROFILE)
    assert cache.recall(KEY) is None
    cache.remember(KEY, wire)
    assert ProfileCache(tmp_path / "profiles").recall(KEY) == wire
    others = [
        ProfileKey.of("another device", 2, {"hidden_size": "64"}, "float32"),
        ProfileKey.of("a device", 1, {"hidden_size": "64"}, "float32"),
        ProfileKey.of("a device", 2, {"hidden_size": "65"}, "float32"),
        ProfileKey.of("a device", 2, {"hidden_size": "64"}, "bfloat16"),
        msgspec.structs.replace(KEY, version="0.0.0"),
    ]
    assert [cache.recall(other) for other in others] == [None] * 5
    cache.remember(others[0], WireProfile.of(replace(PROFILE, overhead=Seconds(0.5))))
    assert cache.recall(KEY) == wire
    cache.forget(KEY)
    assert cache.recall(KEY) is None
    assert cache.recall(others[0]) is not None
    cache.forget(KEY)


def test_without_a_folder_nothing_is_remembered() -> None:
    cache = ProfileCache(None)
    cache.remember(KEY, WireProfile.of(PROFILE))
    cache.forget(KEY)
    assert cache.recall(KEY) is None


def test_one_changed_byte_of_a_kept_profile_has_it_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, wire = ProfileCache(tmp_path), WireProfile.of(PROFILE)
    cache.remember(KEY, wire)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for place in range(0, len(whole), 3):
        for byte in (b"9", b"\xff", b""):
            caplog.clear()
            file.write_bytes(whole[:place] + byte + whole[place + 1 :])
            found = cache.recall(KEY)
            assert found in (None, wire)
            assert (found is None) == ("measured anew" in caplog.text)
    file.write_bytes(b"[" * (2 << 20))
    assert cache.recall(KEY) is None


def test_a_folder_that_cannot_be_written_is_said_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        ProfileCache(tmp_path / "file" / "profiles").remember(KEY, WireProfile.of(PROFILE))
    assert "cannot be written" in caplog.text
