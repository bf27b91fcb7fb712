"""Between the job's files and the coordinator: records become requests, outcomes become answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from typing import Protocol

from bbquic.errors import RecordError
from bbquic.runtime.answers import Answer, Answers, AnswersFile
from bbquic.runtime.job import JobFile
from bbquic.runtime.record import BadRecord, Record
from bbquic.runtime.request import Completion, Outcome, Request

CHUNK = 32  # records read and tokenised at a time, off the event loop


class PromptTokenizer(Protocol):
    """What turns a record into tokens (`model.tokenizer.Tokenizer`)."""

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


class RecordSource:
    """Feeds a job's records to a coordinator and keeps what becomes of them.

    Everything that touches the two files runs on one thread of its own, in order: the event loop never
    waits for a disk, and the answers file is never used by two threads.
    """

    def __init__(
        self, job: JobFile, answers: Answers, tokenizer: PromptTokenizer, *, context_length: int
    ) -> None:
        self.done = 0  # answered, and on disk
        self.skipped = 0  # had their record before this run
        self.failures: Counter[str] = Counter()  # error records of this run, by code
        self._job = job
        self._answers = answers
        self._tokenizer = tokenizer
        self._context = context_length
        self._open: dict[int, tuple[Record, int]] = {}  # line: its record, and tokens of its prompt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="job-files")

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def requests(self) -> AsyncGenerator[Request, None]:
        """Every line that still needs an answer and can have one; the others get their error record here.

        Raises: JobError when the prompts cannot be read, or were edited under their answers.
        """
        loop = asyncio.get_running_loop()
        records = iter(self._job)
        last = 0
        while chunk := await loop.run_in_executor(self._thread, lambda: self._read(records)):
            last = chunk[-1].line
            for item in chunk:
                if isinstance(item, Request):
                    yield item
        if isinstance(self._answers, AnswersFile):
            self._answers.check_end(last)

    async def keep(self, outcomes: Sequence[Outcome]) -> None:
        """Write a group of outcomes; they are counted once they are on disk. Raises: JobError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: self._append([self._record(o) for o in outcomes]))

    def _read(self, records: Iterator[Record | BadRecord]) -> list[Request | Record | BadRecord]:
        """The next lines: requests, and what needs none. Empty at the end of the file."""
        items: list[Request | Record | BadRecord] = []
        bad: list[Answer | BadRecord] = []
        for record in islice(records, CHUNK):
            item: Request | Record | BadRecord = record
            if self._answers.check_line(record.line, record.input_sha):
                self.skipped += 1
            else:
                if isinstance(record, Record):
                    item = self._request(record)
                if isinstance(item, BadRecord):
                    bad.append(item)
            items.append(item)
        self._append(bad)
        return items

    def _request(self, record: Record) -> Request | BadRecord:
        try:
            tokens = self._tokens(record)
        except RecordError as error:
            return record.refused(error)
        self._open[record.line] = (record, len(tokens))
        return Request(
            line=record.line,
            tokens=tuple(tokens),
            max_tokens=min(record.max_tokens, self._context - len(tokens)),
            sampling=record.sampling,
            stop=record.stop,
        )

    def _tokens(self, record: Record) -> list[int]:
        if record.messages is not None:
            tokens = self._tokenizer.encode_chat([asdict(message) for message in record.messages])
        else:
            tokens = self._tokenizer.encode(record.prompt or "")
        if not tokens:
            raise RecordError("empty_prompt", "the prompt has no tokens")
        if len(tokens) >= self._context:
            raise RecordError(
                "prompt_too_long",
                f"the prompt has {len(tokens)} tokens, and the model's context is {self._context}",
            )
        return tokens

    def _record(self, outcome: Outcome) -> Answer | BadRecord:
        record, prompt_tokens = self._open.pop(outcome.line)
        if isinstance(outcome, Completion):
            return Answer.of(record, prompt_tokens, outcome)
        return record.refused(RecordError(outcome.code, outcome.message))

    def _append(self, outcomes: Sequence[Answer | BadRecord]) -> None:
        self._answers.append(outcomes)
        for outcome in outcomes:
            if isinstance(outcome, Answer):
                self.done += 1
            else:
                self.failures[outcome.code] += 1
