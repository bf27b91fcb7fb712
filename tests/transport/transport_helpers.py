"""Networks to run the same tests on: real QUIC over loopback, and the one in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from bbquic.transport.channel import Channel, Endpoint, Role, Sent
from bbquic.transport.endpoint import QuicEndpoint, open_endpoint_here
from bbquic.transport.identity import Identity, Peer, make_identity
from bbquic.transport.memory import MemoryEndpoint, MemoryNetwork
from bbquic.transport.message import Kind, Message
from bbquic.transport.options import EndpointOptions
from bbquic.transport.threaded import ThreadedEndpoint, open_endpoint

ENGINE = "0.1.0"
DEADLINE = 60.0  # seconds; a test that waits for what never comes fails, in place of hanging


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await main()

    asyncio.run(bounded())


def make_identities(*names: str) -> dict[str, Identity]:
    return {name: make_identity(name) for name in names}


def make_peers(identities: dict[str, Identity]) -> dict[str, Peer]:
    return {name: Peer(name, None, (identity.fingerprint,)) for name, identity in identities.items()}


def text(content: str, kind: Kind = Kind.TOKENS) -> Message:
    return Message(kind, content.encode())


class Net(Protocol):
    """Opens endpoints by name, on one machine, and closes them all."""

    async def open(
        self,
        identity: Identity,
        peers: dict[str, Peer],
        role: Role = Role.NODE,
        *,
        engine: str = ENGINE,
        options: EndpointOptions | None = None,
    ) -> Endpoint: ...

    async def vanish(self, endpoint: Endpoint) -> None:
        """The process dies: nobody hears from it again."""

    async def close(self) -> None: ...


class QuicNet:
    def __init__(self) -> None:
        self._endpoints: list[QuicEndpoint] = []

    async def open(
        self,
        identity: Identity,
        peers: dict[str, Peer],
        role: Role = Role.NODE,
        *,
        engine: str = ENGINE,
        options: EndpointOptions | None = None,
    ) -> QuicEndpoint:
        endpoint = await open_endpoint_here(
            identity, peers, role, host="127.0.0.1", engine=engine, options=self.adapt(options)
        )
        self._endpoints.append(endpoint)
        return endpoint

    def adapt(self, options: EndpointOptions | None) -> EndpointOptions | None:
        return options

    async def vanish(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, QuicEndpoint)
        assert endpoint._socket is not None
        endpoint._socket.close()
        endpoint._socket = None

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()


class PlainNet(QuicNet):
    """Without what only Linux, or only this aioquic, has."""

    def adapt(self, options: EndpointOptions | None) -> EndpointOptions:
        return replace(options or EndpointOptions(), fast_paths=False, batched_sockets=False)


class ThreadedNet:
    """Each endpoint on a thread of its own."""

    def __init__(self) -> None:
        self._endpoints: list[ThreadedEndpoint] = []

    async def open(
        self,
        identity: Identity,
        peers: dict[str, Peer],
        role: Role = Role.NODE,
        *,
        engine: str = ENGINE,
        options: EndpointOptions | None = None,
    ) -> ThreadedEndpoint:
        endpoint = await open_endpoint(
            identity, peers, role, host="127.0.0.1", engine=engine, options=options
        )
        self._endpoints.append(endpoint)
        return endpoint

    async def vanish(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, ThreadedEndpoint)
        await endpoint._thread.ask(QuicNet().vanish(endpoint._endpoint))

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()


class MemoryNet:
    def __init__(self) -> None:
        self._network = MemoryNetwork()
        self._endpoints: list[MemoryEndpoint] = []

    async def open(
        self,
        identity: Identity,
        peers: dict[str, Peer],
        role: Role = Role.NODE,
        *,
        engine: str = ENGINE,
        options: EndpointOptions | None = None,
    ) -> MemoryEndpoint:
        endpoint = self._network.endpoint(identity, peers, role, engine=engine, options=options)
        self._endpoints.append(endpoint)
        return endpoint

    async def vanish(self, endpoint: Endpoint) -> None:
        assert isinstance(endpoint, MemoryEndpoint)
        endpoint.vanish()

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.close()


class Pair:
    """Two machines that know each other, home-a and home-b, and their endpoints."""

    def __init__(self, net: Net, identities: dict[str, Identity], peers: dict[str, Peer]) -> None:
        self.net = net
        self.identities = identities
        self.peers = peers
        self.a: Endpoint
        self.b: Endpoint

    def at(self, name: str, endpoint: Endpoint) -> Peer:
        """A machine's entry, with the address where it turned out to be."""
        return replace(self.peers[name], address=endpoint.address)

    @property
    def peer_a(self) -> Peer:
        return self.at("home-a", self.a)

    @property
    def peer_b(self) -> Peer:
        return self.at("home-b", self.b)

    async def join(self) -> tuple[Channel, Channel]:
        """Dial home-b from home-a: both ends."""
        dialled = await self.a.connect(self.peer_b)
        return dialled, await self.b.accept()


async def make_pair(net: Net, options: EndpointOptions | None = None, engine_b: str = ENGINE) -> Pair:
    identities = make_identities("home-a", "home-b")
    pair = Pair(net, identities, make_peers(identities))
    pair.a = await net.open(identities["home-a"], pair.peers, Role.COMMAND, options=options)
    pair.b = await net.open(identities["home-b"], pair.peers, Role.NODE, options=options, engine=engine_b)
    return pair


def with_net(make: Callable[[], Net], body: Callable[[Net], Awaitable[None]]) -> None:
    """Run a test's body on a fresh network, and close that whatever happens."""

    async def main() -> None:
        net = make()
        try:
            await body(net)
        finally:
            await net.close()

    run(main)


async def until_blocked(
    send: Callable[[], Coroutine[Any, Any, Sent]], at_most: int
) -> tuple[int, asyncio.Task[Sent]]:
    """Call `send` until one call does not return while its peer is idle; how many did, and that one."""
    for count in range(at_most):
        task = asyncio.ensure_future(send())
        if not await _returns(task):
            return count, task
    raise AssertionError(f"{at_most} messages were taken, and nobody reads")


async def _returns(task: asyncio.Future[Sent]) -> bool:
    """Whether a task ends before the network, which is all in this process, has come to rest."""
    done, _ = await asyncio.wait([task], timeout=0.5)
    return bool(done)
