"""The emulator itself: hosts, traffic through them, and what is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.wan import Link, Network, Uplink, Wan, WanError, WanUnavailable, cli, hosts, mesh
from bench.wan.description import network_of, network_of_file, settings_of
from bench.wan.measure import PORT, finish, flow, run_probe, start_receiver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    """Three hosts, for tests that set what they need. Only traffic between them is seen."""
    network = Network(("a", "b", "c"), mtus={"c": 1280})
    try:
        with Wan(network) as running:
            yield running
    except WanUnavailable as unavailable:
        pytest.skip(str(unavailable))


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_flow_gets_the_rate_and_no_more(wan: Wan) -> None:
    wan.set(
        "a", "b", rate_mbps=20, delay_ms=5, queue_ms=5000
    )  # the queue is soon full of all there is to send
    seen = flow(wan, "a", "b", 200, 0.12)
    wan.set("a", "b", queue_ms=100)
    assert seen["received"] == seen["sent"] > 1000
    assert seen["mbps"] < 20 * 1.03  # how near it comes on an idle machine, `bench.wan measure` shows


def test_directions_are_independent(wan: Wan) -> None:
    wan.set("a", "b", loss=1.0, delay_ms=0)
    wan.set("b", "a", rate_mbps=None, delay_ms=0)
    seen = flow(wan, "b", "a", 10, 0.2)
    wan.set("a", "b", loss=0.0)
    assert seen["received"] == seen["sent"] > 0


def test_no_packet_is_quicker_than_the_delay(wan: Wan) -> None:
    wan.set("a", "b", rate_mbps=None, delay_ms=30)
    wan.set("b", "a", rate_mbps=None, delay_ms=10)
    receiver = start_receiver(wan, "b")
    pinged = run_probe(wan, "a", "ping", wan.address("b"), str(PORT), "10")
    assert '"received": 10' in pinged
    assert finish(receiver)["delay_ms_min"] >= 30


def test_losses_are_those_asked_for(wan: Wan) -> None:
    wan.set("a", "b", rate_mbps=None, delay_ms=1, loss=0.1)
    before = wan.statistics()["a", "b"]
    seen = flow(wan, "a", "b", 20, 1.0)
    after = wan.statistics()["a", "b"]
    wan.set("a", "b", loss=0.0)
    assert 0.06 < seen["lost"] < 0.14  # five standard deviations of 1700 packets and more
    assert (
        after.packets_in - before.packets_in
        == after.lost - before.lost + after.packets_out - before.packets_out
    )


def test_what_waits_at_a_link_that_is_down_arrives_when_it_is_up(wan: Wan) -> None:
    wan.set("a", "b", rate_mbps=50, queue_ms=1000, up=False)
    receiver = start_receiver(wan, "b")
    run_probe(wan, "a", "send", wan.address("b"), str(PORT), "20", "1480", "0.1", "1")
    wan.set("a", "b", up=True)
    seen = finish(receiver)
    assert seen["received"] == seen["sent"] > 0


def test_tcp_passes_and_slows_to_the_rate_step(wan: Wan) -> None:
    wan.set_both("a", "b", rate_mbps=100, delay_ms=1, queue_ms=50)
    address = wan.address("b")
    receive = python(
        "import socket, time\n"
        f"server = socket.create_server(('{address}', 5002)); print('ready', flush=True)\n"
        "peer, _ = server.accept(); begin = time.monotonic(); size = 0\n"
        "while part := peer.recv(1 << 20): size += len(part)\n"
        "print(size, time.monotonic() - begin)"
    )
    receiver = wan.run("b", receive, deadline_s=30, stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    wan.set("a", "b", rate_mbps=20)
    program = f"import socket\nsocket.create_connection(('{address}', 5002)).sendall(bytes(2_000_000))"
    wan.run("a", python(program), deadline_s=30).wait()
    size, seconds = receiver.communicate()[0].split()
    assert int(size) == 2_000_000
    assert (
        float(seconds) > 2_000_000 * 8 / 20e6 * 0.9
    )  # the sender's first packets leave before the clock starts


def test_two_flows_of_a_host_share_its_uplink(wan: Wan) -> None:
    wan.set("a", "b", rate_mbps=None, delay_ms=0)
    wan.set_uplink("a", Uplink(rate_mbps=10, queue_ms=200))
    receivers = [start_receiver(wan, "b"), start_receiver(wan, "c")]
    senders = [
        wan.run(
            "a",
            [
                sys.executable,
                str(ROOT / "bench/wan/probe.py"),
                "send",
                wan.address(to),
                str(PORT),
                "10",
                "1200",
                "1",
                "1",
            ],
            deadline_s=30,
        )
        for to in ("b", "c")
    ]
    assert [sender.wait() for sender in senders] == [0, 0]
    seen = [finish(receiver) for receiver in receivers]
    wan.set_uplink("a", None)
    took = max(one["last_s"] for one in seen) - min(one["first_s"] for one in seen)
    # whenever the two ran, what both received took the uplink at least its time
    assert took > sum(one["bytes"] for one in seen) * 8 / 10e6 * 0.95
    assert all(one["received"] > 200 for one in seen)


def test_packets_over_a_links_mtu_vanish(wan: Wan) -> None:
    wan.set("a", "b", rate_mbps=None, delay_ms=0, mtu=1300)
    before = wan.statistics()["a", "b"].too_big
    assert flow(wan, "a", "b", 5, 0.1, size=1300)["received"] > 0
    with pytest.raises(WanError, match="no packets"):
        flow(wan, "a", "b", 5, 0.1, size=1301)
    wan.set("a", "b", mtu=None)
    assert wan.statistics()["a", "b"].too_big > before


def test_a_host_has_the_mtu_asked_for_and_no_other_way_out(wan: Wan) -> None:
    program = (
        "import os; print(*sorted(os.listdir('/sys/class/net')), open('/sys/class/net/wan0/mtu').read())"
    )
    assert (
        wan.run("c", python(program), deadline_s=30, stdout=subprocess.PIPE).communicate()[0]
        == "lo wan0 1280\n\n"
    )


def test_a_program_is_ended_at_its_deadline(wan: Wan) -> None:
    command = wan.run("a", python("import signal; signal.pause()"), deadline_s=0.01)
    assert command.wait() == -signal.SIGKILL
    assert command.is_expired


def test_a_program_finds_the_addresses_in_its_environment(wan: Wan) -> None:
    program = "import os; print(os.environ['WAN_ADDRESS_B'])"
    output = wan.run("a", python(program), deadline_s=30, stdout=subprocess.PIPE).communicate()[0]
    assert output.strip() == wan.address("b")


def test_a_change_that_cannot_be_leaves_the_link_as_it_is(wan: Wan) -> None:
    before = wan.link("a", "b")
    with pytest.raises(ValueError, match="loss"):
        wan.set("a", "b", loss=2)
    with pytest.raises(TypeError, match="speed"):
        wan.set("a", "b", speed=2)
    with pytest.raises(KeyError):
        wan.set("a", "z", loss=0.5)
    assert wan.link("a", "b") == before


@pytest.mark.usefixtures("wan")
def test_an_exception_leaves_no_namespace_and_no_process() -> None:
    before = hosts.existing()
    commands = []

    def fail() -> None:
        with Wan(mesh("a", "b", link=Link())) as other:
            commands.append(other.run("a", python("import signal; signal.pause()"), deadline_s=60))
            assert len(hosts.existing()) == len(before) + 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hosts.existing() == before
    assert commands[0].returncode == -signal.SIGKILL


@pytest.mark.usefixtures("wan")
def test_when_the_owner_is_killed_its_relay_removes_the_hosts() -> None:
    before = hosts.existing()
    program = (
        "import signal, sys\nfrom bench.wan import Link, Wan, mesh\n"
        "with Wan(mesh('a', 'b', link=Link())) as wan:\n"
        "    wan.run('a', [sys.executable, '-c', 'import signal; signal.pause()'], deadline_s=60)\n"
        "    print('ready', flush=True); signal.pause()"
    )
    with subprocess.Popen(
        python(program),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        assert owner.stdout.readline() == "ready\n"
        assert len(hosts.existing()) == len(before) + 2
        owner.kill()
        assert owner.stderr.read() == ""  # ends when the last that holds it does, and that is the relay
    assert hosts.existing() == before


@pytest.mark.usefixtures("wan")
def test_only_namespaces_of_dead_owners_are_stale() -> None:
    before = hosts.existing()
    with subprocess.Popen(python("")) as dead:
        pass
    stale = f"bbwan-{dead.pid}-1-abcdef-a"
    hosts.add(stale)
    assert hosts.remove_stale() == [stale]
    assert hosts.existing() == before


def test_without_root_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WanUnavailable, match="root"):
        Wan(mesh("a", "b", link=Link())).__enter__()


@pytest.mark.usefixtures("wan")
@pytest.mark.parametrize(("name", "named"), [("ALSO_IN", "iproute2"), ("TUN", "/nowhere")])
def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, name: str, named: str) -> None:
    monkeypatch.setattr(hosts, name, "/nowhere")
    if name == "ALSO_IN":
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(WanUnavailable, match=named):
        hosts.check_available()


def test_outside_of_its_block_a_network_says_that_it_is_not_there() -> None:
    with pytest.raises(WanError, match="with"):
        Wan(mesh("a", "b", link=Link())).statistics()


@pytest.mark.usefixtures("wan")
def test_the_command_line_runs_a_command_in_a_host_and_returns_its_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = "import os; print(os.environ['WAN_ADDRESS_B']); raise SystemExit(7)"
    arguments = [
        "run",
        "--hosts",
        "a,b",
        "--link",
        "a:b:rate=20,loss=0.5%",
        "--at",
        "a",
        "--",
        *python(program),
    ]
    assert cli.main(arguments) == 7
    assert capfd.readouterr().out == "198.18.0.2\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run"], "--hosts or --file"),
        (["run", "--hosts", "a,b", "--link", "rate=20"], "a:b:rate=20"),
        (["run", "--hosts", "a,b", "--link", "a:rate=20"], "two hosts"),
        (["run", "--hosts", "a,b", "--link", "a:b:speed=20"], "speed"),
        (["run", "--hosts", "a,b", "--link", "a:b:rate=fast"], "fast"),
        (["run", "--hosts", "a,b", "--link", "a:c:rate=20"], "'c'"),
        (["run", "--hosts", "a,b", "--default", "rate"], "name=value"),
        (["run", "--file", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_the_command_line_names_what_is_wrong(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert named in output.err


def test_a_file_and_a_command_line_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(
        'hosts = ["a", "b", "c"]\nmtu = 1280\ndefault = {rate = 100, delay = 20}\n'
        '[link."a:b"]\nrate = 20\nloss = "0.5%"\n[one-way."b:a"]\nqueue-bytes = 9000\n[uplink.c]\nrate = 5\n'
    )
    written = network_of(
        hosts=["a", "b", "c"],
        both=[("a:b", settings_of("rate=20,loss=0.5%"))],
        one_way=[("b:a", settings_of("queue-bytes=9000"))],
        uplinks=[("c", settings_of("rate=5"))],
        default=settings_of("rate=100,delay=20"),
        mtu=1280,
    )
    assert network_of_file(path) == written
    assert written.link("a", "b") == Link(rate_mbps=20, loss=0.005)
    assert written.link("b", "c") == Link(rate_mbps=100, delay_ms=20)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hosts = [", "network.toml"),
        ("seed = 1", "hosts"),
        ('hosts = ["a"]\nhost = 1', "'host'"),
        ("hosts = 1", "iterable"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "network.toml"
    path.write_text(text)
    with pytest.raises(WanError, match=named):
        network_of_file(path)
