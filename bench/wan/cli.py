"""`python -m bench.wan`: a network for a command, and the emulator's measurement of itself."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from bench.wan import hosts
from bench.wan.counters import LinkStatistics
from bench.wan.description import network_of, network_of_file, settings_of
from bench.wan.emulator import MODERATION_US, Wan
from bench.wan.errors import WanError
from bench.wan.link import Network, Pair
from bench.wan.measure import measure_all, table

EXAMPLES = """\
examples:
  python -m bench.wan run --hosts a,b --link a:b:rate=20,delay=50,loss=0.5% --at a -- ping -c 5 198.18.0.2
  python -m bench.wan run --hosts a,b,c --default rate=100,delay=20 --uplink a:rate=20 -- ./my-bench.sh
  python -m bench.wan run --file network.toml --at a
  python -m bench.wan measure --seconds 2

links: rate (Mbit/s), delay (one way), jitter, jitter-hold, queue, reorder-delay (ms), loss, reorder (a
share, or with %), burst (mean length of a run of losses), queue-bytes, mtu (bytes). A command finds its
hosts' addresses and namespaces in WAN_ADDRESS_A, WAN_NAMESPACE_A and so on.
"""


def main(arguments: list[str]) -> int:
    """Returns the exit code: of the command that was run, or 2 where the network could not be."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.do(options))
    except (WanError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """Run a command, by default a shell, in a host or beside all of them."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = command or [os.environ.get("SHELL", "/bin/sh")]
    with Wan(_network(options), moderation_us=options.moderation) as wan:
        variables = {**os.environ, **wan.environment()}
        argv = command if options.at is None else wan.command(_known(options.at, wan), command)
        for host, address in ((host, wan.address(host)) for host in wan.network.hosts):
            print(f"{host}: {address} in namespace {wan.namespace(host)}", file=sys.stderr)
        try:
            code = subprocess.run(argv, env=variables, check=False).returncode
        except OSError as error:
            raise WanError(f"cannot run {argv[0]}: {error.strerror}") from error
        for line in _summary(wan.statistics()):
            print(line, file=sys.stderr)
    return code


def measure(options: argparse.Namespace) -> int:
    """Print what the emulator does against what it is asked for."""
    rows = []
    for row in measure_all(options.seconds, options.moderation):
        rows.append(row)
        print(f"measured {len(rows)}", file=sys.stderr)
    for line in table(rows):
        print(line)
    if options.json is not None:
        with options.json.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return 0


def clean(options: argparse.Namespace) -> int:
    """Remove what killed runs have left."""
    hosts.check_available()
    for namespace in hosts.remove_stale():
        print(namespace)
    return 0


def _summary(statistics: Mapping[Pair, LinkStatistics]) -> Iterator[str]:
    for (source, to), seen in statistics.items():
        if seen.packets_in:
            yield (
                f"{source} to {to}: {seen.packets_in} packets, {seen.bytes_in / 1e6:.2f} MB; "
                f"{seen.dropped} dropped by a queue, {seen.lost} lost, {seen.too_big} too big; "
                f"waited {seen.longest_queue_ms:.0f} ms at most"
            )


def _known(host: str, wan: Wan) -> str:
    if host not in wan.network.hosts:
        raise WanError(f"no host is called {host!r}")
    return host


def _network(options: argparse.Namespace) -> Network:
    if options.file is not None:
        return network_of_file(options.file)
    if options.hosts is None:
        raise WanError("say which network: --hosts or --file")
    return network_of(
        hosts=options.hosts.split(","),
        both=[_named(text) for text in options.link],
        one_way=[_named(text) for text in options.one_way],
        uplinks=[_named(text) for text in options.uplink],
        default=settings_of(options.default) if options.default else None,
        mtu=options.mtu,
        seed=options.seed,
    )


def _named(text: str) -> tuple[str, dict[str, str]]:
    """`a:b:rate=20` as `a:b` and settings."""
    name, colon, settings = text.rpartition(":")
    if not colon:
        raise WanError(f"{text!r} is not hosts and settings, as in a:b:rate=20")
    return name, settings_of(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.wan",
        description="Emulate a wide-area network between network namespaces (Linux, root).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run a command in a network")
    one.add_argument(
        "--file", type=Path, help="the network, in TOML; instead of all but --at and --moderation"
    )
    one.add_argument("--hosts", help="names, with commas")
    one.add_argument("--link", action="append", default=[], metavar="A:B:SETTINGS", help="both directions")
    one.add_argument("--one-way", action="append", default=[], metavar="A:B:SETTINGS", help="from A to B")
    one.add_argument(
        "--uplink", action="append", default=[], metavar="A:SETTINGS", help="for all that A sends"
    )
    one.add_argument("--default", metavar="SETTINGS", help="for directions without settings of their own")
    one.add_argument("--mtu", type=int, default=1500, help="of each host's interface")
    one.add_argument("--seed", type=int, default=1, help="of loss, jitter and reordering")
    one.add_argument("--at", metavar="HOST", help="where the command runs; without, outside of the network")
    one.add_argument("command", nargs=argparse.REMAINDER, help="-- and a command; a shell by default")
    one.set_defaults(do=run)
    two = commands.add_parser("measure", help="measure the emulator itself")
    two.add_argument("--seconds", type=float, default=2.0, help="of each flow, two for a setting")
    two.add_argument("--json", type=Path, help="append a line for each setting to this file")
    two.set_defaults(do=measure)
    for command in (one, two):
        command.add_argument(
            "--moderation", type=float, default=MODERATION_US, help="µs, see bench/METHODOLOGY.md"
        )
    three = commands.add_parser("clean", help="remove what killed runs have left")
    three.set_defaults(do=clean)
    return parser
