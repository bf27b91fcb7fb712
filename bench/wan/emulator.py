"""`Wan`: a network that exists while its `with` block runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.wan import control, hosts
from bench.wan.counters import LinkStatistics, RelayStatistics
from bench.wan.errors import WanError
from bench.wan.link import Link, Network, Pair, Uplink

SUBNET = "198.18.0"  # RFC 2544: for measurements, and on no real network
ROOT = Path(__file__).resolve().parents[2]
RELAY_SECONDS = 20.0  # the relay answers within a millisecond; a machine may be very busy
MODERATION_US = 50.0  # a network card's interrupts wait about as long, and packets at 200 Mbit/s do

Stream = int | IO[str] | None


class Command(subprocess.Popen[str]):
    """A program in a host, in text mode. At its deadline it is killed, with its process group."""

    def __init__(self, argv: list[str], *, deadline_s: float, **popen: Any) -> None:
        super().__init__(argv, text=True, start_new_session=True, **popen)
        self.is_expired = False  # whether the deadline has ended it
        self._timer = threading.Timer(deadline_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def wait(self, timeout: float | None = None) -> int:
        """Its return code; after the deadline, that of the kill."""
        code = super().wait(timeout)
        self._timer.cancel()
        return code

    def kill(self) -> None:
        """End it and what it has started; no error where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, reap it, and close its pipes."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _expire(self) -> None:
        if self.poll() is None:
            self.is_expired = True
            self.kill()


class Wan:
    """A network of hosts on this machine. Entering it needs root; leaving it ends all that runs in the hosts.

    moderation_us: the relay may hold packets for so long when they come in numbers, to spare the machine (see
    `bench.wan.relay`); 0 gives each its own time.
    """

    def __init__(self, network: Network, *, moderation_us: float = MODERATION_US) -> None:
        self._network = network
        self._moderation_us = moderation_us
        self._links = {pair: network.link(*pair) for pair in network.pairs()}
        self._namespaces: dict[str, str] = {}
        self._commands: list[Command] = []
        self._relay: socket.socket | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Wan:
        """Raises: WanUnavailable where this machine cannot; WanError where the relay does not start."""
        hosts.check_available()
        hosts.remove_stale()
        with ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def network(self) -> Network:
        """As it was asked for at first; `link` says what a direction is now."""
        return self._network

    def address(self, host: str) -> str:
        """Raises: KeyError where no host is called so; as do all that take a host."""
        places = {one: place for place, one in enumerate(self._network.hosts, start=1)}
        return f"{SUBNET}.{places[host]}"

    def namespace(self, host: str) -> str:
        """Its name, for `ip netns exec`."""
        return self._namespaces[host]

    def environment(self) -> dict[str, str]:
        """WAN_ADDRESS_A and WAN_NAMESPACE_A for host a, and so on."""
        variables = {}
        for host in self._network.hosts:
            variables[f"WAN_ADDRESS_{host.upper()}"] = self.address(host)
            variables[f"WAN_NAMESPACE_{host.upper()}"] = self.namespace(host)
        return variables

    def command(self, host: str, argv: list[str]) -> list[str]:
        """A command line that runs `argv` in the host; `run` is what looks after it as well."""
        return hosts.inside(self.namespace(host), argv)

    def run(
        self,
        host: str,
        argv: list[str],
        *,
        deadline_s: float,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> Command:
        """Start a program in the host. It ends at its deadline at the latest, or with the network.

        env: instead of this process's; `environment` is added to either. Raises: OSError.
        """
        variables = {**(os.environ if env is None else env), **self.environment()}
        command = Command(
            self.command(host, argv),
            deadline_s=deadline_s,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=variables,
            cwd=cwd,
        )
        self._commands.append(command)
        return command

    def link(self, source: str, destination: str) -> Link:
        """What the direction is now."""
        return self._links[source, destination]

    def set(self, source: str, destination: str, **changes: Any) -> None:
        """Change some fields of one direction's `Link`; in force when this returns.

        What waits is served as the new link does; only what a new queue limit has no room for is dropped.
        Raises: ValueError on a value that no link can have, TypeError on an unknown field.
        """
        link = replace(self._links[source, destination], **changes)
        self._ask({"do": "link", "pair": [source, destination], "link": control.plain(link)})
        self._links[source, destination] = link

    def set_both(self, one: str, other: str, **changes: Any) -> None:
        """`set` for each of the two directions."""
        self.set(one, other, **changes)
        self.set(other, one, **changes)

    def set_uplink(self, host: str, uplink: Uplink | None) -> None:
        """Give the host a bottleneck that all it sends passes first; None takes it away."""
        self.address(host)
        fields = None if uplink is None else control.plain(uplink)
        self._ask({"do": "uplink", "host": host, "uplink": fields})

    def statistics(self) -> dict[Pair, LinkStatistics]:
        """By direction, since the network began."""
        return control.links_from(self._ask({"do": "count"}))

    def relay_statistics(self) -> RelayStatistics:
        return control.relay_from(self._ask({"do": "count"}))

    def _build(self, stack: ExitStack) -> None:
        """Everything is registered for removal before, or as, it is made."""
        stack.callback(self._forget)
        prefix = hosts.owner_prefix()
        tuns: list[int] = []
        for host in self._network.hosts:
            namespace = self._namespaces[host] = prefix + host
            stack.callback(hosts.remove, namespace)
            hosts.add(namespace)
            tun = hosts.add_device(namespace, f"{self.address(host)}/24", self._network.mtu(host))
            stack.callback(os.close, tun)
            tuns.append(tun)
        self._start_relay(tuns, stack)
        stack.callback(self._end_commands)

    def _start_relay(self, tuns: list[int], stack: ExitStack) -> None:
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        ours.settimeout(RELAY_SECONDS)
        with theirs:
            descriptors = [theirs.fileno(), *tuns]
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.wan.relay", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        stack.callback(_reap, process)
        self._relay = ours
        stack.callback(self._stop_relay)
        setup = {
            "network": control.network_to(self._network),
            "addresses": [self.address(host) for host in self._network.hosts],
            "mtus": [self._network.mtu(host) for host in self._network.hosts],
            "namespaces": list(self._namespaces.values()),
            "moderation_s": self._moderation_us / 1e6,
        }
        self._ask(setup)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Raises: WanError where the network is not there, or its relay does not answer."""
        if self._relay is None:
            raise WanError("the network exists only within its `with` block")
        try:
            control.send(self._relay, message)
            answer = control.receive(self._relay)
        except OSError as error:
            raise WanError(f"the relay does not answer: {error}") from error
        if answer is None:
            raise WanError("the relay has ended; its error is on stderr")
        return answer

    def _end_commands(self) -> None:
        for command in self._commands:
            command.close()

    def _stop_relay(self) -> None:
        with suppress(WanError):
            self._ask({"do": "stop"})

    def _forget(self) -> None:
        self._relay = None
        self._commands.clear()
        self._namespaces.clear()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """The relay has been told to stop, and does so at once; where it hangs it is killed."""
    try:
        process.wait(RELAY_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
