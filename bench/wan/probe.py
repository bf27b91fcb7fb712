"""Traffic that measures a path: a program for each of its two ends. It imports nothing of this package.

    probe.py receive ADDRESS PORT       echoes pings, counts the rest; JSON on stdout when no more comes
    probe.py send ADDRESS PORT RATE SIZE SECONDS SEGMENTS   a flow of RATE Mbit/s in IP packets of SIZE bytes
    probe.py ping ADDRESS PORT COUNT    round trips, one every 5 ms; JSON on stdout

Times are the receiver's kernel's (SO_TIMESTAMPNS), so that a receiver that is late does not distort them.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from itertools import pairwise
from statistics import median

HEAD = struct.Struct("<cIq")  # kind, number, sent at (nanoseconds of CLOCK_REALTIME)
PING, DATA, END = b"p", b"d", b"e"
IP_AND_UDP = 28
SO_TIMESTAMPNS = 35
UDP_SEGMENT = 103
SO_RCVBUFFORCE = 33
QUIET = 1.0  # seconds without a packet after which nothing more is expected
QUIET_AFTER_END = 0.3
PATIENCE = 20.0  # seconds until the first
END_REPEATS = 20  # some of them arrive even where half of all packets do not


def receive(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.bind((address, port))
        sock.settimeout(PATIENCE)
        print("ready", flush=True)
        rows: list[tuple[int, int, int, int]] = []  # number, sent at, received at, IP bytes
        sent = 0
        while True:
            try:
                data, ancillary, _, sender = sock.recvmsg(65536, 128)
            except TimeoutError:
                break
            if not sent:
                sock.settimeout(QUIET)
            kind, number, sent_at = HEAD.unpack_from(data)
            if kind == PING:
                sock.sendto(data, sender)
            if kind == END:
                sent = number
                sock.settimeout(QUIET_AFTER_END)
                continue
            seconds, nanoseconds = struct.unpack_from("<qq", ancillary[0][2])
            rows.append((number, sent_at, seconds * 1_000_000_000 + nanoseconds, len(data) + IP_AND_UDP))
    print(json.dumps(summary(rows, sent)))


def summary(rows: list[tuple[int, int, int, int]], sent: int) -> dict[str, float]:
    """sent: how many the sender says it has sent; 0 where unknown."""
    if len(rows) < 2:
        return {"received": len(rows), "sent": sent}
    times = [row[2] for row in rows]
    delays = sorted((row[2] - row[1]) / 1e6 for row in rows)
    seconds = (times[-1] - times[0]) / 1e9
    return {
        "received": len(rows),
        "sent": sent,
        "bytes": sum(row[3] for row in rows),
        "first_s": times[0] / 1e9,
        "last_s": times[-1] / 1e9,
        "lost": 1 - len(rows) / sent if sent else 0.0,
        "reordered": sum(after[0] < before[0] for before, after in pairwise(rows)),
        "mbps": sum(row[3] for row in rows[1:]) * 8 / seconds / 1e6,
        "delay_ms_min": delays[0],
        "delay_ms_p50": median(delays),
        "delay_ms_p99": delays[len(delays) * 99 // 100],
        "gap_us_p50": median(after - before for before, after in pairwise(times)) / 1e3,
    }


def send(address: str, port: int, rate: float, size: int, seconds: float, segments: int) -> None:
    """segments: datagrams in one system call (UDP_SEGMENT)."""
    padding = bytes(size - IP_AND_UDP - HEAD.size)
    ancillary = [(socket.SOL_UDP, UDP_SEGMENT, struct.pack("=H", size - IP_AND_UDP))]
    gap = segments * size * 8e-6 / rate
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        number = 0
        begin = time.monotonic()
        while (due := begin + number // segments * gap) < begin + seconds:
            wait = due - time.monotonic()
            if wait > 5e-4:  # catching up after a sleep is cheaper than many short ones
                time.sleep(wait)
            now = time.time_ns()
            packets = [HEAD.pack(DATA, number + place, now) + padding for place in range(segments)]
            if segments == 1:
                sock.send(packets[0])
            else:
                sock.sendmsg(packets, ancillary)
            number += segments
        _end(sock, number)


def ping(address: str, port: int, count: int) -> None:
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        sock.settimeout(QUIET)
        for number in range(count):
            begin = time.time_ns()
            sock.send(HEAD.pack(PING, number, begin))
            try:
                while HEAD.unpack(sock.recv(64))[1] != number:
                    pass
            except TimeoutError:
                continue
            trips.append((time.time_ns() - begin) / 1e6)
            time.sleep(0.005)
        _end(sock, count)
    print(json.dumps({"sent": count, "received": len(trips), "rtt_ms_p50": median(trips) if trips else None}))


def _end(sock: socket.socket, sent: int) -> None:
    for _ in range(END_REPEATS):
        sock.send(HEAD.pack(END, sent, 0))


def main() -> None:
    match sys.argv[1:]:
        case ["receive", address, port]:
            receive(address, int(port))
        case ["send", address, port, rate, size, seconds, segments]:
            send(address, int(port), float(rate), int(size), float(seconds), int(segments))
        case ["ping", address, port, count]:
            ping(address, int(port), int(count))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
