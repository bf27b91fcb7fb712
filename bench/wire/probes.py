"""Probing all pairs of five hosts, in the rounds that `plan_probes` gives: time, bytes and error."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import permutations
from pathlib import Path
from typing import Any

from bbquic.transport.identity import new_identity
from bbquic.transport.probe import Link as Direction
from bbquic.transport.probe import plan_probes
from bench.wan import Link, Wan
from bench.wan.link import Network

RATES = {"ant": 20.0, "bee": 40.0, "cow": 80.0, "dog": 125.0, "elk": 200.0}  # Mbit/s a host sends at
DELAY_MS = 20.0
DEADLINE_S = 120.0


def probe_all() -> dict[str, float]:
    """Seconds for all pairs, most bytes of a pair (both directions), and the largest error of a rate.

    A rate that no burst of could be timed counts as an error of 1.
    """
    links = {
        (source, target): Link(rate_mbps=RATES[source], delay_ms=DELAY_MS)
        for source, target in permutations(RATES, 2)
    }
    with tempfile.TemporaryDirectory(prefix="bbquic-probes-") as folder:
        for name in RATES:
            new_identity(name, Path(folder))
        with Wan(Network(tuple(RATES), links)) as wan:
            hosts = {name: _start(wan, name) for name in RATES}
            addresses = {}
            for name, host in hosts.items():
                _tell(host, {"keys": folder, "host": wan.address(name)})
                addresses[name] = (wan.address(name), _hear(host)["port"])
            for host in hosts.values():
                _tell(host, addresses)
            for host in hosts.values():
                _hear(host)
            return _probe(hosts)


def _probe(hosts: dict[str, Any]) -> dict[str, float]:
    directions = [Direction(source, target) for source, target in permutations(hosts, 2)]
    bytes_of: dict[frozenset[str], int] = {}
    errors = []
    started = time.monotonic()
    for together in plan_probes(directions, {name: name for name in hosts}):
        for source, target in together:
            _tell(hosts[source], {"probe": target})
        for source, target in together:
            found = _hear(hosts[source])
            pair = frozenset((source, target))
            bytes_of[pair] = bytes_of.get(pair, 0) + int(found["bytes"])
            rate = found["rate"] or 0.0
            errors.append(abs(rate * 8 / 1e6 / RATES[source] - 1))
    return {
        "probe_five_peers_s": time.monotonic() - started,
        "probe_pair_bytes": float(max(bytes_of.values())),
        "probe_largest_error": max(errors),
    }


def _start(wan: Wan, name: str) -> Any:
    argv = [sys.executable, "-m", "bench.wire.prober", name]
    return wan.run(name, argv, deadline_s=DEADLINE_S, stdin=-1, stdout=-1)


def _tell(process: Any, line: Any) -> None:
    print(json.dumps(line), file=process.stdin, flush=True)


def _hear(process: Any) -> dict[str, Any]:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a prober ended, exit code {process.wait()}")
    heard: dict[str, Any] = json.loads(line)
    return heard
