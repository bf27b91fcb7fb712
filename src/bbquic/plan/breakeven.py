"""Whether compressing a hop's messages pays, and by which codec: by measured figures, with hysteresis.

Alone, a message takes the sum of its parts; overlapped by others in the lanes, the slowest part is what it
takes of the hop's time. Pure: figures in, a choice and its reason out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bbquic.units import Bytes, BytesPerSecond, Seconds

GAIN = 0.005  # of a message's time: less is not worth a change, and what a change could be wrong by
LEAST_PAYLOAD = Bytes(2048)  # a smaller one is sent before a codec's fixed costs are paid
WORST_RATIO = 0.995  # a codec that saves less is not worth its electricity
PROBE_EVERY = 64  # messages, while a codec is off: what it would do is measured anew
PROBE_SHARE = 0.002  # of the time of the messages between two probes, at most, is spent on probing
PROBE_BYTES = Bytes(64 * 1024)  # of a message are enough to measure a codec by
NEWEST = 0.2  # weight of the newest sample


class Way(StrEnum):
    """How a hop sends."""

    RAW = "raw"
    H8 = "H8"
    REC = "REC"


@dataclass(frozen=True, slots=True)
class CodecSample:
    """A message through a codec: bytes before and after, seconds at either end (None: not known)."""

    raw: Bytes
    packed: Bytes
    encode: Seconds
    decode: Seconds | None = None


@dataclass(frozen=True, slots=True)
class HopConditions:
    """`rate` of the link, None while unknown; `payload`, a usual message's raw bytes; whether messages of
    other micro-batches keep the lanes busy meanwhile."""

    rate: BytesPerSecond | None
    payload: Bytes
    overlapped: bool


@dataclass(slots=True)
class CodecFigures:
    """What a codec does on a hop, averaged: size ratio, and seconds a raw byte at either end."""

    ratio: float
    encode: float
    decode: float

    def time(self, conditions: HopConditions) -> float:
        """Seconds a raw byte takes on the hop."""
        assert conditions.rate is not None
        link = self.ratio / conditions.rate
        if conditions.overlapped:
            return max(self.encode, link, self.decode)
        return self.encode + link + self.decode

    def learn(self, sample: CodecSample) -> None:
        raw = max(sample.raw, 1)
        self.ratio += NEWEST * (sample.packed / raw - self.ratio)
        self.encode += NEWEST * (sample.encode / raw - self.encode)
        if sample.decode is not None:
            self.decode += NEWEST * (sample.decode / raw - self.decode)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a hop does now, and why, in words with the figures behind it."""

    way: Way
    reason: str


@dataclass(slots=True)
class CodecSwitch:
    """One hop's. `note` what codecs did, `choose` before each message; `probe` says what to measure."""

    now: Choice = field(default_factory=lambda: Choice(Way.RAW, "nothing measured yet"))
    _figures: dict[Way, CodecFigures] = field(default_factory=dict)
    _since_probe: dict[Way, int] = field(default_factory=dict)

    def note(self, way: Way, sample: CodecSample) -> None:
        """A message, or a part of one, went through a codec. Encoding's time may stand in for decoding's."""
        figures = self._figures.get(way)
        if figures is None:
            raw = max(sample.raw, 1)
            decode = sample.encode if sample.decode is None else sample.decode
            self._figures[way] = CodecFigures(sample.packed / raw, sample.encode / raw, decode / raw)
        else:
            figures.learn(sample)

    def figures(self) -> Mapping[Way, CodecFigures]:
        return self._figures

    def choose(self, conditions: HopConditions) -> Choice:
        """The way for the next message; the present one unless another is clearly better."""
        if conditions.payload < LEAST_PAYLOAD:
            self.now = Choice(Way.RAW, f"messages of {conditions.payload} bytes are too short to compress")
        elif conditions.rate is None:
            self.now = Choice(Way.RAW, "the link was never seen full, so its rate is not known")
        elif self._figures:
            self._weigh(conditions)
        return self.now

    def _weigh(self, conditions: HopConditions) -> None:
        assert conditions.rate is not None
        times = {Way.RAW: 1 / conditions.rate}
        times |= {
            way: figures.time(conditions)
            for way, figures in self._figures.items()
            if figures.ratio <= WORST_RATIO
        }
        best = min(times, key=lambda way: times[way])
        present = self.now.way if self.now.way in times else Way.RAW
        way = best if times[best] < (1 - GAIN) * times[present] else present
        self.now = Choice(way, self._reason(way, times, conditions))

    def _reason(self, way: Way, times: Mapping[Way, float], conditions: HopConditions) -> str:
        assert conditions.rate is not None
        link = f"a link of {conditions.rate * 8 / 1e6:.0f} Mbit/s"
        others = [one for one in times if one is not Way.RAW]
        if not others:
            ratio = min(figures.ratio for figures in self._figures.values())
            return f"codecs leave {ratio:.0%} of the bytes, which saves too little"
        shown = way if way is not Way.RAW else min(others, key=lambda one: times[one])
        figures = self._figures[shown]
        speeds = f"coding at {_mbit(figures.encode)} and {_mbit(figures.decode)} Mbit/s"
        change = abs(1 - times[shown] / times[Way.RAW])
        verb = "saves" if times[shown] < times[Way.RAW] else "would cost"
        return f"{shown} leaves {figures.ratio:.0%}, {speeds}: on {link} it {verb} {change:.0%} of the time"

    def probe(self, conditions: HopConditions, ways: tuple[Way, ...]) -> tuple[Way, Bytes] | None:
        """A codec to measure beside the next message, and on how many of its bytes; nearly always None.

        Each of `ways` that is not in use is tried at first, then once in PROBE_EVERY messages, or more seldom
        where that would take over PROBE_SHARE of the time.
        """
        if conditions.payload < LEAST_PAYLOAD:
            return None
        size = Bytes(min(conditions.payload, PROBE_BYTES))
        for way in ways:
            if way is self.now.way:
                self._since_probe[way] = 0
                continue
            waited = self._since_probe[way] = self._since_probe.get(way, 0) + 1
            if way not in self._figures or waited >= self._interval(way, size, conditions):
                self._since_probe[way] = 0
                return way, size
        return None

    def _interval(self, way: Way, size: Bytes, conditions: HopConditions) -> float:
        if conditions.rate is None:
            return PROBE_EVERY
        figures = self._figures[way]
        cost = size * (figures.encode + figures.decode)
        message = conditions.payload / conditions.rate
        return max(PROBE_EVERY, cost / (PROBE_SHARE * message))


def _mbit(seconds_a_byte: float) -> str:
    return f"{8e-6 / seconds_a_byte:.0f}" if seconds_a_byte > 0 else "∞"
