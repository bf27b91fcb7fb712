"""Distilling a draft: what it learns from, going on after an interruption, and what is in its directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bbquic.draft.distill.corpus import Passage, is_held_out, read_corpus
from bbquic.draft.distill.distillation import Distillation, DistillOptions, Progress, default_blocks
from bbquic.draft.distill.lessons import LessonOptions, Lessons
from bbquic.draft.distill.objective import Batch, Words, chain_passes, loss
from bbquic.draft.distill.student import Student
from bbquic.draft.distill.teacher import Lesson, Teacher
from bbquic.draft.distill.trainer import STATE, TrainingOptions
from bbquic.draft.distilled import DESCRIPTION, SCALE, read_distilled, read_own
from bbquic.draft.drafter import Ask
from bbquic.draft.load import load_drafter
from bbquic.draft.small import ModelDrafterOptions
from bbquic.errors import ConfigError, ModelError
from bbquic.model.directory import SINGLE, ModelDirectory
from bbquic.model.sampling import Sampling
from bbquic.model.stored import read_header
from bbquic.model.weights import tensors_for
from bbquic.units import Bytes, Seconds
from tiny_model import make_tiny_llama

OPTIONS = DistillOptions(
    blocks=(0, 3),
    lessons=LessonOptions(answer=12),
    training=TrainingOptions(epochs=4, batch=6, warm_up=4, rate=2e-3),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return ModelDirectory(make_tiny_llama(tmp_path_factory.mktemp("target") / "t", tied=True), "t")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [{"id": str(number), "prompt": f"the {number} and of {3 * number}"} for number in range(70)]
    chat = [{"messages": [{"role": "user", "content": "to in is that"}], "max_tokens": 9}]
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    texts = [{"text": "the and of to in is that it was " * 30}]
    file.write_text("\n".join(json.dumps(line) for line in [*lines, *chat, *texts]))
    return file


class Made:
    """A distillation that was run to its end."""

    def __init__(self, target: ModelDirectory, data: Path, folder: Path, options: DistillOptions) -> None:
        self.folder, self.work = folder / "draft", folder / "work"
        self.distillation = Distillation(target, data, self.folder, self.work, options)
        self.progress = self.distillation.run()

    @property
    def draft(self) -> ModelDirectory:
        return ModelDirectory(self.folder, "draft")


@pytest.fixture(scope="module")
def made(target: ModelDirectory, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(target, data, tmp_path_factory.mktemp("made"), OPTIONS)


def test_a_teacher_says_what_transformers_does_and_keeps_the_states_behind_it(target: ModelDirectory) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    prompts = [[5, 9, 40], [1, 2, 3, 4, 5, 6, 7], list(range(20, 60))]
    for prompt, lesson in zip(prompts, Teacher(target).lessons(prompts, 10), strict=True):
        assert lesson.tokens[: len(prompt)].tolist() == prompt
        assert lesson.answer == len(prompt) < len(lesson.tokens) == len(lesson.hidden)
        with torch.inference_mode():
            seen = oracle(lesson.tokens.long()[None]).logits[0]
            told = oracle.lm_head(oracle.model.norm(lesson.hidden))
        assert seen[lesson.answer - 1 : -1].argmax(-1).tolist() == lesson.tokens[lesson.answer :].tolist()
        torch.testing.assert_close(told, seen, rtol=1e-3, atol=1e-3)


def test_an_answer_ends_with_an_end_token_and_text_is_only_read(target: ModelDirectory) -> None:
    prompt = [5, 9, 40]
    said = Teacher(target).lessons([prompt], 8)[0].tokens.tolist()[len(prompt) :]
    teacher = Teacher(target)
    teacher._ends = torch.tensor([said[2]])
    first = said.index(said[2])
    assert teacher.lessons([prompt], 8)[0].tokens.tolist() == [*prompt, *said[:first]]
    (read,) = teacher.lessons([prompt], 0)
    assert (read.tokens.tolist(), read.answer, len(read.hidden)) == (prompt, 3, 3)


def test_lines_become_passages_and_the_same_one_is_taken_once(target: ModelDirectory, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    words = "the and of to " * 4
    lines = [{"text": words}, {"prompt": words}, {"prompt": words}, {"text": "x"}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    tokens = target.tokenizer.encode(words)
    found = read_corpus(file, target.tokenizer, prompt_tokens=3, text_tokens=len(tokens) - 1)
    # Of the text's two pieces the last has one token, as the text "x" has: nothing to tell it from.
    assert found == [
        Passage(tuple(tokens[:-1]), is_prompt=False),
        Passage(tuple(tokens[-3:]), is_prompt=True),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": 3}',
        "{}",
        '{"prompt": "a", "text": "b"}',
        '{"prompt": ""}',
        '{"messages": [{}]}',
    ],
)
def test_a_line_that_is_no_passage_is_refused_by_number(
    target: ModelDirectory, tmp_path: Path, line: str
) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "the"}\n' + line)
    with pytest.raises(ConfigError, match=r"d\.jsonl, line 2: "):
        read_corpus(file, target.tokenizer, prompt_tokens=9, text_tokens=9)


def test_a_file_without_passages_or_no_file_is_refused(target: ModelDirectory, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, why in (("empty", "nothing to train on"), ("none", "cannot read")):
        with pytest.raises(ConfigError, match=why):
            read_corpus(tmp_path / name, target.tokenizer, prompt_tokens=9, text_tokens=9)


def test_lessons_are_kept_for_more_data_and_a_damaged_one_is_refused(
    target: ModelDirectory, data: Path, made: Made
) -> None:
    files = sorted((made.work / "lessons").glob("*.safetensors"))
    lessons = Lessons(files)
    assert len(lessons) == len(lessons.lengths) == 71 + len(lessons[71:])
    assert [len(lessons[place].tokens) for place in range(len(lessons))] == lessons.lengths
    before = {file: file.stat().st_mtime_ns for file in files}
    longer = data.with_name("longer.jsonl")
    longer.write_text(data.read_text() + '\n{"text": "had by hot but some"}')
    Made(target, longer, made.folder.parent / "longer", replace(OPTIONS, training=TrainingOptions(epochs=1)))
    shutil.copytree(made.work / "lessons", made.folder.parent / "again" / "work" / "lessons")
    again = Made(target, longer, made.folder.parent / "again", OPTIONS)
    assert {file: file.stat().st_mtime_ns for file in files} == before
    assert (
        len(list((again.work / "lessons").iterdir())) == len(files) + 1
    )  # that of prompts was not made anew
    torn = made.folder.parent / "torn.safetensors"
    torn.write_bytes(files[0].read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"torn\.safetensors is damaged"):
        Lessons([torn])


class Interrupted(Distillation):
    """Stops itself where it is told to, as a signal would."""

    at: tuple[bool, int]

    def _goes_on(self, done: int, total: int) -> bool:
        if (self.progress.trains, done) == self.at:
            self.stop()
        return super()._goes_on(done, total)


@pytest.mark.parametrize("stops", [[(False, 71)], [(True, 7)], [(True, 1), (True, 25), (True, 26)]])
def test_interrupted_and_resumed_is_as_if_it_had_not_been(
    target: ModelDirectory, data: Path, made: Made, tmp_path: Path, stops: list[tuple[bool, int]]
) -> None:
    for stop in stops:
        part = Interrupted(target, data, tmp_path / "draft", tmp_path / "work", OPTIONS)
        part.at = stop
        assert not part.run().is_done
    assert Made(target, data, tmp_path, OPTIONS).progress.is_done
    for name in (SINGLE, "config.json", DESCRIPTION):
        assert (tmp_path / "draft" / name).read_bytes() == (made.folder / name).read_bytes()


def test_a_checkpoint_of_other_options_or_data_is_refused(
    target: ModelDirectory, data: Path, made: Made, tmp_path: Path
) -> None:
    shutil.copytree(made.work, tmp_path / "work")
    for options in (
        replace(OPTIONS, blocks=(0, 2)),
        replace(OPTIONS, training=replace(OPTIONS.training, rate=1e-3)),
    ):
        with pytest.raises(ConfigError, match="checkpoint of other data, options"):
            Distillation(target, data, tmp_path / "draft", tmp_path / "work", options).run()
    assert not (tmp_path / "draft").exists()
    (tmp_path / "work" / STATE).write_text('{"step": "x"}')
    with pytest.raises(ModelError, match=r"checkpoint in .* is damaged"):
        Distillation(target, data, tmp_path / "draft", tmp_path / "work", OPTIONS).run()


def test_nothing_is_pickled(made: Made) -> None:
    kept = [file for file in (*made.work.rglob("*"), *made.folder.rglob("*")) if file.is_file()]
    assert {file.suffix for file in kept} == {".safetensors", ".json", ".jsonl"}


def test_it_learns_and_says_how_well(made: Made) -> None:
    log = [json.loads(line) for line in (made.work / "log.jsonl").read_text().splitlines()]
    assert log[0]["step"] == 0
    assert log[-1]["step"] == log[-1]["steps"] == made.progress.total
    assert made.progress.score is not None
    assert made.progress.score.first > log[0]["held_out"]["first"] + 0.1
    assert made.progress.score.chain_of_three > log[0]["held_out"]["chain_of_three"] >= 1
    assert made.progress.score.first_four >= made.progress.score.first


def test_what_is_held_out_never_trains(target: ModelDirectory, data: Path, made: Made) -> None:
    passages = read_corpus(data, target.tokenizer, prompt_tokens=128, text_tokens=128)
    held = sum(is_held_out(passage.tokens) for passage in passages)
    lessons = Lessons(sorted((made.work / "lessons").iterdir()))
    assert held == sum(map(lessons.is_held_out, range(len(lessons)))) > 0
    per_epoch = -(-(len(passages) - held) // OPTIONS.training.batch)
    assert made.progress.total == per_epoch * OPTIONS.training.epochs


def test_what_it_says_and_the_target_s_own_blocks_agree(target: ModelDirectory) -> None:
    """All blocks in their order are the target: no loss, nothing to learn."""
    student = Student(target, range(target.blocks))
    lessons = Teacher(target).lessons([[5, 9, 40], [7, 8, 9, 10]], 6)
    batch = Batch.of(lessons)
    words = Words.draw(batch.tokens, torch.arange(200), len(student.head), 1)
    assert abs(float(loss(student, batch, words).detach())) < 1e-4
    assert float(loss(Student(target, (0,)), batch, words).detach()) > 0.1


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 40), common=st.lists(st.integers(0, 9999), unique=True, max_size=50))
def test_words_have_all_that_is_asked_for_once_and_stand_for_the_rest(seed: int, common: list[int]) -> None:
    tokens = torch.tensor([[3, 4, 5], [4, 9, 0]])
    words = Words.draw(tokens, torch.tensor(common, dtype=torch.int64), 10_000, seed)
    ids = words.ids.tolist()
    assert len(set(ids)) == len(ids)
    assert {0, 3, 4, 5, 9, *common} <= set(ids)
    assert float(words.extra.exp().sum()) == pytest.approx(10_000, rel=1e-4)


@given(right=st.lists(st.booleans(), max_size=40), guesses=st.integers(1, 5))
def test_chains_are_walked_as_a_pass_after_another(right: list[bool], guesses: int) -> None:
    text, passes = list(right), 0
    while text:
        run = next((n for n, hit in enumerate(text[:guesses]) if not hit), len(text[:guesses]))
        del text[: run + 1]
        passes += 1
    assert chain_passes(right, guesses) == passes


def test_neither_embedding_nor_tokenizer_is_stored_again(target: ModelDirectory, made: Made) -> None:
    assert sorted(file.name for file in made.folder.iterdir()) == ["config.json", DESCRIPTION, SINGLE]
    names = read_header(made.folder / SINGLE)
    assert not any("embed" in name or "head" in name for name in names)
    stored = sum(tensor.length for tensor in names.values())
    one_block = sum(
        np.prod(shape)
        for shape in tensors_for(target.spec, target.config, range(2), embeds=False, heads=False).values()
    )
    assert stored < 1.2 * one_block  # a byte a value, and scales
    distilled = read_distilled(made.draft)
    assert distilled is not None
    assert distilled.blocks == (0, 3)
    assert made.draft.blocks == 2


def ask(tokens: list[int]) -> Ask:
    return Ask(1, tokens, Sampling(), guesses=9, depth=4)


def whole(target: ModelDirectory, made: Made, folder: Path) -> ModelDirectory:
    """The same draft with its ends and tokenizer beside it, in float32."""
    shutil.copytree(target.path, folder)
    shutil.copy(made.folder / "config.json", folder)
    blocks = tensors_for(made.draft.spec, made.draft.config, range(2), embeds=False, heads=True)
    own = read_own(made.folder / SINGLE, {n: shape for n, shape in blocks.items() if "embed" not in n})
    ends = load_file(target.path / SINGLE)
    save_file({**own, "model.embed_tokens.weight": ends["model.embed_tokens.weight"]}, folder / SINGLE)
    return ModelDirectory(folder, "whole")


def test_a_distilled_draft_guesses_what_the_same_model_in_full_does(
    target: ModelDirectory, made: Made, tmp_path: Path
) -> None:
    options, free = ModelDrafterOptions(), Bytes(1 << 30)
    one = load_drafter(made.draft, target, options, free=free)
    other = load_drafter(whole(target, made, tmp_path / "w"), target, options, free=free)
    for prompt in ([5, 9, 40, 41], list(range(20, 50))):
        (mine,), (its,) = one.draft([ask(prompt)]), other.draft([ask(prompt)])
        assert mine == its
        assert mine.guesses == 9


def test_bytes_of_a_draft_are_what_was_learnt_to_half_a_step(target: ModelDirectory, made: Made) -> None:
    state = json.loads((made.work / STATE).read_text())
    learnt = load_file(next(made.work.glob(f"*{state['step']}.*.safetensors")))
    held = load_file(made.folder / SINGLE)
    for name in (name for name in held if not name.endswith(SCALE)):
        if held[name].ndim == 1:
            assert torch.equal(held[name], learnt[name])
        else:
            scale = held[name + SCALE][:, None]
            assert ((held[name] * scale - learnt[name]).abs() <= 0.501 * scale).all()


def test_another_target_is_refused_and_what_differs_is_named(
    target: ModelDirectory, made: Made, tmp_path: Path
) -> None:
    other = ModelDirectory(make_tiny_llama(tmp_path / "o", seed=1, tied=True), "other")
    with pytest.raises(
        ModelError, match=r"draft was distilled from t, and other .*: its model\.embed_tokens\.weight"
    ):
        load_drafter(made.draft, other, ModelDrafterOptions(), free=Bytes(1 << 30))
    shutil.copytree(target.path, tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text((target.path / "tokenizer.json").read_text() + "\n")
    same = ModelDirectory(tmp_path / "t", "t")
    with pytest.raises(ModelError, match=r"its tokenizer\.json differs"):
        load_drafter(made.draft, same, ModelDrafterOptions(), free=Bytes(1 << 30))


PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda held: held.pop(PROJECTION), f"has no {PROJECTION}"),
        (lambda held: held.update({PROJECTION: held[PROJECTION][1:]}), f"has no {PROJECTION}"),
        (lambda held: held.update({PROJECTION: held[PROJECTION].float()}), f"has no {PROJECTION}"),
        (lambda held: held.pop(PROJECTION + SCALE), f"has no scales for {PROJECTION}"),
        (lambda held: held[PROJECTION + SCALE].fill_(float("inf")), f"{PROJECTION} is not finite"),
    ],
)
def test_a_damaged_draft_is_refused_by_what_is_damaged(
    target: ModelDirectory, made: Made, tmp_path: Path, change: object, why: str
) -> None:
    shutil.copytree(made.folder, tmp_path / "d")
    held = load_file(made.folder / SINGLE)
    change(held)  # type: ignore[operator]
    save_file(held, tmp_path / "d" / SINGLE)
    with pytest.raises(ModelError, match=why):
        load_drafter(ModelDirectory(tmp_path / "d", "d"), target, ModelDrafterOptions(), free=Bytes(1 << 30))
    (tmp_path / "d" / DESCRIPTION).write_text('{"target": "t"}')
    with pytest.raises(ModelError, match=r"draft\.json is damaged"):
        read_distilled(ModelDirectory(tmp_path / "d", "d"))


def test_blocks_are_the_first_ones_and_the_last_or_those_that_there_are(target: ModelDirectory) -> None:
    assert default_blocks(30) == (0, 1, 2, 29)
    assert default_blocks(2) == (0, 1)
    with pytest.raises(ConfigError, match=r"t has blocks 0 to 3, not \[0, 4\]"):
        Student(target, (0, 4))


def test_progress_knows_when_it_will_be_done() -> None:
    assert Progress(trains=True, done=3, total=9, rate=2.0).left == Seconds(3.0)
    assert Progress(total=9).left is None
    assert not Progress(done=9, total=9).is_done  # lessons are not the draft


def test_a_lesson_that_only_was_read_counts_less(target: ModelDirectory) -> None:
    lesson = Lesson(torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.zeros(4, 8), 2)
    short = Lesson(torch.tensor([1, 2], dtype=torch.int32), torch.zeros(2, 8), 2)
    weights = Batch.of([lesson, short]).weights
    assert weights.tolist() == [pytest.approx([0.3, 1, 1, 1]), pytest.approx([0.3, 0.3, 0, 0])]
