"""What a planner hears of a cluster: profiles, links, and why there is none."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_helpers import (
    COMMAND,
    CPU,
    QUICK,
    Cluster,
    answer,
    cluster_of,
    options,
    run,
    run_model,
    until,
    write_prompts,
)

from bbquic.plan.cluster import NodeProfile
from bbquic.runtime.measure import Profiler
from bbquic.runtime.profile_cache import ProfileCache
from bbquic.runtime.protocol import (
    LinksHeader,
    MeasureHeader,
    PingHeader,
    PongHeader,
    ProfileHeader,
    RefusedHeader,
    SurveyHeader,
)
from bbquic.runtime.survey import FLOOR, LOOPBACK, Survey, hosts_of, survey
from bbquic.transport.channel import Channel
from bbquic.transport.identity import Peer, make_identity
from bbquic.transport.message import Kind, Message, decode_header_untrusted, encode_header
from bbquic.units import Bytes, Seconds


async def channels_of(cluster: Cluster, name: str = COMMAND) -> list[Channel]:
    return [await cluster.endpoints[name].connect(peer) for peer in cluster.places()]


async def surveyed(cluster: Cluster, model: Path, **more: Any) -> Survey:
    channels = more.pop("channels", None) or await channels_of(cluster)
    how = more.pop("options", QUICK)
    manifest = run_model(model).manifest
    return await survey(channels, cluster.places(), manifest, "float32", options=how, **more)


async def reply(channel: Channel, kind: Kind) -> Message:
    while True:
        message = await channel.receive()
        if message.kind is kind:
            return message


def pairs(*names: str) -> set[tuple[str, str]]:
    return {(a, b) for a in names for b in names if a != b}


def test_every_node_and_every_pair_is_known_whatever_order_messages_come_in(
    model: Path, profiles: Path
) -> None:
    heard: list[str] = []

    async def main() -> None:
        async with cluster_of([model] * 3, order=random.Random(5), profiles=profiles) as cluster:
            hosts = {"node-1": "a", "node-2": "b", "node-3": "b"}
            found = await surveyed(cluster, model, prices={"node-2": 0.5}, hosts=hosts, report=heard.append)
            assert [node.name for node in found.cluster.nodes] == ["node-1", "node-2", "node-3"]
            assert [node.price for node in found.cluster.nodes] == [None, 0.5, None]
            links = found.cluster.links
            assert set(links) == pairs("node-1", "node-2", "node-3", COMMAND)
            assert links["node-2", "node-3"] == links["node-3", "node-2"] == LOOPBACK
            for pair in pairs("node-1", "node-2", COMMAND):
                assert links[pair].rate == FLOOR  # memory shows no bottleneck
                assert links[pair].delay > 0
            assert len(found.notes) == len(pairs("node-1", "node-2", "node-3", COMMAND)) - 2
            assert all("nothing was seen to limit the link" in note for note in found.notes)

    run(main)
    assert "node-1: measured" in heard
    assert any("round 1 of" in line for line in heard)


def test_over_quic_links_are_measured_once_and_believed_for_a_while(model: Path, profiles: Path) -> None:
    heard: list[str] = []

    async def main() -> None:
        async with cluster_of([model] * 2, quic=True, profiles=profiles) as cluster:
            channels = await channels_of(cluster)
            apart = {"node-1": "a", "node-2": "b", COMMAND: "c"}
            found = await surveyed(cluster, model, channels=channels, hosts=apart, report=heard.append)
            assert set(found.cluster.links) == pairs("node-1", "node-2", COMMAND)
            assert all(link.rate > 0 and 0 < link.delay < 1 for link in found.cluster.links.values())
            assert not any("cannot" in note for note in found.notes)
            due = sum(line.startswith("links: round") for line in heard)
            assert due >= 2  # three hosts, each with two others to send to
            measured = [pair for pair in found.cluster.links if not noted(pair, found)]
            heard.clear()
            again = await surveyed(cluster, model, channels=channels, hosts=apart, report=heard.append)
            assert set(again.cluster.links) == set(found.cluster.links)
            if len(measured) == len(found.cluster.links):  # a path without a bottleneck is probed each time
                assert not any(line.startswith("links: round") for line in heard)
            together = await surveyed(cluster, model, channels=channels)  # all on 127.0.0.1, as they are
            assert set(together.cluster.links.values()) == {LOOPBACK}

    run(main)


def noted(pair: tuple[str, str], found: Survey) -> bool:
    return any(f"from {pair[0]} to {pair[1]}:" in note for note in found.notes)


def test_a_node_that_cannot_be_reached_by_another_is_noted_and_the_pair_left_out(
    model: Path, profiles: Path
) -> None:
    async def main() -> None:
        async with cluster_of([model] * 2, profiles=profiles) as cluster:
            peers = cluster.nodes["node-1"]._appraiser._peers
            wrong = replace(cluster.peers["node-2"], address=("memory", 99))
            cluster.nodes["node-1"]._appraiser._peers = {**peers, "node-2": wrong}
            found = await surveyed(cluster, model, hosts={"node-1": "a", "node-2": "b"})
            assert set(found.cluster.links) == pairs("node-1", "node-2", COMMAND) - {("node-1", "node-2")}
            (note,) = [note for note in found.notes if "cannot send" in note]
            assert note.startswith("node-1 cannot send to node-2: node-2 does not answer at")

    run(main)


def test_a_node_that_is_gone_is_left_out_and_the_others_are_known(model: Path, profiles: Path) -> None:
    async def main() -> None:
        async with cluster_of([model] * 3, profiles=profiles) as cluster:
            channels = await channels_of(cluster)
            await cluster.endpoints["node-2"].close()
            found = await surveyed(cluster, model, channels=channels)
            assert [node.name for node in found.cluster.nodes] == ["node-1", "node-3"]
            assert any(note.startswith("node-2 is left out: ") for note in found.notes)
            assert set(found.cluster.links) == pairs("node-1", "node-3", COMMAND)

    run(main)


def test_a_node_that_does_not_answer_in_time_is_named(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            channels = await channels_of(cluster)
            cluster.tasks["node-1"].cancel()
            how = replace(QUICK, profile=Seconds(0.05))
            found = await surveyed(cluster, model, channels=channels, options=how)
            assert found.cluster.nodes == ()
            assert any("waited 0 s for node-1 to measure itself" in note for note in found.notes)

    run(main)


def test_what_a_node_cannot_measure_is_told_in_its_own_words(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            manifest = run_model(model).manifest
            channels = await channels_of(cluster)
            found = await survey(channels, cluster.places(), manifest, "float16", options=QUICK)
            assert "node-1 is left out: CPU, 1 thread does not compute in float16" in found.notes
            other = msgspec.structs.replace(manifest, config={**manifest.config, "model_type": '"mamba"'})
            found = await survey(channels, cluster.places(), other, "float32", options=QUICK)
            assert "models of type 'mamba' are not supported" in found.notes[0]

    run(main)


def test_a_peer_without_the_right_gets_neither_a_profile_nor_a_survey(model: Path, profiles: Path) -> None:
    commands = {COMMAND: frozenset({"coordinate"}), "guest": frozenset[str]()}

    async def main() -> None:
        async with cluster_of([model], commands=commands, profiles=profiles) as cluster:
            (channel,) = await channels_of(cluster, "guest")
            config = run_model(model).manifest.config
            for kind, header in (
                (Kind.MEASURE, encode_header(MeasureHeader("tiny", config, "float32", False))),
                (Kind.SURVEY, encode_header(SurveyHeader(1, ("node-1",), ()))),
                (Kind.SURVEY, encode_header(SurveyHeader(2, ("command",), ("command",)))),
            ):
                await channel.send(Message(kind, header))
                refused = decode_header_untrusted(RefusedHeader, (await reply(channel, Kind.REFUSED)).header)
                assert "guest, which may not coordinate" in refused.reason
            found = await surveyed(cluster, model, channels=[channel])
            assert "may not coordinate" in found.notes[0]

    run(main)


class Held(Profiler):
    """Measures when it is told to."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(CPU, ProfileCache(folder), budget=Seconds(0.0))
        self.begun, self.go, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.times = 0

    def measured(self, asked: MeasureHeader, held: Bytes, stop: Callable[[], bool]) -> NodeProfile:
        self.times += 1
        self.begun.set()
        while not self.go.wait(0.001):
            if stop():
                self.stopped.set()
        return super().measured(asked, held, stop)


def test_a_node_that_measures_still_says_what_it_is_at(model: Path, tmp_path: Path) -> None:
    heard: list[str] = []

    async def main() -> None:
        async with cluster_of([model]) as cluster:
            profiler = cluster.nodes["node-1"]._appraiser._profiler = Held(tmp_path)
            asking = asyncio.create_task(surveyed(cluster, model, report=heard.append))
            await until(lambda: "node-1: measuring tiny in float32" in heard)
            other = asyncio.create_task(surveyed(cluster, model))  # by another channel; it waits
            (channel,) = await channels_of(cluster)
            await channel.send(Message(Kind.PING, encode_header(PingHeader(1))))
            pong = decode_header_untrusted(PongHeader, (await reply(channel, Kind.PONG)).header)
            assert pong.activity == "measuring tiny in float32"
            profiler.go.set()
            assert len((await asking).cluster.nodes) == len((await other).cluster.nodes) == 1
            assert profiler.times == 1  # the second one gets what the first had measured

    run(main)


def test_a_measurement_is_given_up_when_whoever_asked_is_gone(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            profiler = cluster.nodes["node-1"]._appraiser._profiler = Held(None)
            (channel,) = await channels_of(cluster)
            config = run_model(model).manifest.config
            asked = MeasureHeader("tiny", config, "float32", False)
            await channel.send(Message(Kind.MEASURE, encode_header(asked)))
            await until(profiler.begun.is_set)
            channel.close("gone")
            await until(profiler.stopped.is_set)
            profiler.go.set()
            await until(lambda: cluster.nodes["node-1"]._appraiser.activity is None)

    run(main)


def test_a_busy_node_answers_from_what_it_knows_or_says_that_it_is_busy(
    model: Path, profiles: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "the of", "max_tokens": 8}])

    async def main() -> None:
        async with cluster_of([model], profiles=profiles) as cluster:
            node, (channel,) = cluster.nodes["node-1"], await channels_of(cluster)
            config = run_model(model).manifest.config

            async def ask(fresh: bool) -> ProfileHeader:
                asked = MeasureHeader("tiny", config, "float32", fresh)
                await channel.send(Message(Kind.MEASURE, encode_header(asked)))
                return decode_header_untrusted(ProfileHeader, (await reply(channel, Kind.PROFILE)).header)

            async def busily(_: Any) -> None:
                assert node._busy is not None
                assert (await ask(fresh=False)).profile is not None
                trouble = (await ask(fresh=True)).trouble
                assert trouble is not None
                assert "node-1 is busy with job" in trouble

            @asynccontextmanager
            async def watch(source: Any) -> Any:
                await busily(source)
                yield

            await answer(cluster, model, prompts, tmp_path / "a.jsonl", options(), watch=watch)

    run(main)


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_a_profile_that_a_job_shows_to_be_wrong_is_dropped(
    model: Path,
    tmp_path: Path,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("bbquic.runtime.forecast.LEAST_STEP", 0.0)  # the tiny model's steps are short
    records = [{"prompt": f"the {n}", "max_tokens": 24} for n in range(8)]
    prompts = write_prompts(tmp_path / "p.jsonl", records)
    folder = tmp_path / "profiles"
    caplog.set_level("INFO", "bbquic.node")

    async def main() -> None:
        config = run_model(model).manifest.config
        async with cluster_of([model], profiles=folder) as cluster:
            appraiser = cluster.nodes["node-1"]._appraiser
            profiler = appraiser._profiler
            asked = MeasureHeader("tiny", config, "float32", fresh=False)
            profiler.measured(asked, Bytes(0), lambda: False)
            seen: list[tuple[float, float]] = []
            before = appraiser.job_ended

            def ended(service: Any) -> None:
                """As if packs had taken what they should, or many times that."""
                tally = service.tally
                assert tally.steps > 20
                assert tally.expected > 0
                seen.append((tally.split.compute, tally.expected))
                tally.expected = tally.split.compute / factor
                before(service)

            appraiser.job_ended = ended  # type: ignore[method-assign]
            await answer(cluster, model, prompts, tmp_path / "a.jsonl", options())
            await until(lambda: bool(seen))
            assert (profiler.expected(config, "float32") is None) == (factor > 1)

    run(main)
    assert ("times what the profile says" in caplog.text) == (factor > 1)


def test_a_coordinator_that_asks_for_too_many_surveys_is_told(model: Path) -> None:
    async def main() -> None:
        async with cluster_of([model]) as cluster:
            (channel,) = await channels_of(cluster)
            appraiser = cluster.nodes["node-1"]._appraiser
            appraiser._surveys = 8
            await channel.send(Message(Kind.SURVEY, encode_header(SurveyHeader(5, ("nobody",), ()))))
            links = decode_header_untrusted(LinksHeader, (await reply(channel, Kind.LINKS)).header)
            assert (links.number, links.links[0].trouble) == (5, "node-1 is busy with 8 surveys")
            appraiser._surveys = 0
            await channel.send(Message(Kind.SURVEY, encode_header(SurveyHeader(6, ("nobody", "guest"), ()))))
            links = decode_header_untrusted(LinksHeader, (await reply(channel, Kind.LINKS)).header)
            assert [one.peer for one in links.links] == ["nobody", "guest"]
            assert "node-1 does not know nobody" in (links.links[0].trouble or "")

    run(main)


def test_the_command_is_on_the_nodes_machine_only_where_all_are_on_loopback() -> None:
    def peer(name: str, host: str | None) -> Peer:
        key = make_identity(name).fingerprint
        return Peer(name, None if host is None else (host, 4433), (key,))

    local = [peer("a", "127.0.0.1"), peer("b", "127.0.0.1")]
    assert hosts_of(local) == {"a": "127.0.0.1", "b": "127.0.0.1", COMMAND: "127.0.0.1"}
    apart = hosts_of([peer("a", "127.0.0.1"), peer("b", "10.0.0.2"), peer("c", None)])
    assert apart["a"] != apart[COMMAND] != apart["b"]
    assert apart["c"] == "c"
    assert hosts_of([peer("a", "10.0.0.2")])[COMMAND] == ""
