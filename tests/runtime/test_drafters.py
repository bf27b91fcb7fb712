"""Which drafter a run has, and what drafting came to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bbquic.draft.drafter import Ask
from bbquic.errors import ConfigError
from bbquic.model.directory import ModelDirectory
from bbquic.model.sampling import Sampling
from bbquic.runtime.drafters import DraftMode, DraftOptions, TimedDrafter, make_drafter
from bbquic.runtime.drafts import Drafts
from bbquic.runtime.generate import RunOptions
from bbquic.runtime.layout import CoordinatorPlace, LayoutOptions
from bbquic.runtime.progress import LoopStatistics
from bbquic.runtime.protocol import Stage
from bbquic.transport.message import decode_header_untrusted, encode_header
from bbquic.units import Bytes

FREE = Bytes(1 << 30)


def test_auto_takes_the_draft_model_where_there_is_one_and_n_grams_where_not(tiny: Path) -> None:
    target = ModelDirectory(tiny, "tiny")
    small = DraftOptions(DraftMode.AUTO, target)
    made = {
        mode: make_drafter(options, target, free=FREE)
        for mode, options in {
            "off": DraftOptions(),
            "ngram": DraftOptions(DraftMode.NGRAM),
            "auto": DraftOptions(DraftMode.AUTO),
            "model": small,
        }.items()
    }
    names = {mode: drafter and (drafter.name, drafter.is_instant) for mode, drafter in made.items()}
    n_grams = ("n-grams", True)
    assert names == {"off": None, "ngram": n_grams, "auto": n_grams, "model": ("tiny", False)}
    assert DraftOptions().most_guesses == 0
    assert small.most_guesses == small.guesses > 0


def test_a_draft_model_with_another_drafter_or_none_is_refused(tiny: Path) -> None:
    for mode in (DraftMode.OFF, DraftMode.NGRAM):
        with pytest.raises(ConfigError, match=f"--draft {mode.value} has no use for the draft model tiny"):
            DraftOptions(mode, ModelDirectory(tiny, "tiny"))
    for guesses in (0, 1024):
        with pytest.raises(ConfigError, match="1 to 1023 guesses"):
            DraftOptions(DraftMode.NGRAM, guesses=guesses)


def test_a_draft_model_for_a_coordinator_on_another_machine_is_refused_by_name(tiny: Path) -> None:
    elsewhere = RunOptions(layout=LayoutOptions(coordinator=CoordinatorPlace.STAGE))
    assert replace(elsewhere, drafting=DraftOptions(DraftMode.NGRAM)).drafting.is_on
    with pytest.raises(ConfigError, match="the draft model tiny runs beside the coordinator"):
        replace(elsewhere, drafting=DraftOptions(DraftMode.AUTO, ModelDirectory(tiny, "tiny")))


def test_a_drafters_time_is_counted(tiny: Path) -> None:
    drafter = make_drafter(DraftOptions(DraftMode.NGRAM), ModelDirectory(tiny, "tiny"), free=FREE)
    assert isinstance(drafter, TimedDrafter)
    assert drafter.spent == 0
    (tree,) = drafter.draft([Ask(1, [1, 2, 3, 1, 2], Sampling(), 2, 2)])
    assert tree.tokens == (2, 3, 1)
    spent = drafter.spent
    assert spent > 0
    drafter.learn(1, tree, [0, 1])
    drafter.forget(1)
    assert drafter.spent == spent


def test_what_was_added_since_a_look_is_a_difference_of_sums() -> None:
    before, now = Drafts(10, 12, 30, 2, 0.5), Drafts(30, 52, 90, 22, 0.75)
    assert now.since(before) == Drafts(20, 40, 60, 20, 0.25)
    assert now.since(before).tokens_a_pass == 2.0
    assert Drafts().tokens_a_pass is None


def test_drafts_cross_the_network_and_impossible_ones_do_not() -> None:
    none = LoopStatistics.none((Stage("node-1", 0, 4),))
    told = LoopStatistics(none.stages, none.sums, drafts=Drafts(3, 5, 9, 2, 0.25))
    assert decode_header_untrusted(LoopStatistics, encode_header(told)).drafts == told.drafts
    with pytest.raises(ValueError, match="of 2 guesses 3 cannot be accepted"):
        Drafts(3, 5, 2, 3, 0.25)
    with pytest.raises(ValueError, match="not a finite number"):
        LoopStatistics(none.stages, none.sums, drafts=Drafts(seconds=float("inf")))
