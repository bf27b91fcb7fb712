"""An emulator of a wide-area network: N hosts in network namespaces on one Linux machine, as root.

    with Wan(mesh("a", "b", "c", link=Link(rate_mbps=20, delay_ms=50))) as wan:
        server = wan.run("b", [sys.executable, "-m", "server", wan.address("b")], deadline_s=60)
        wan.set("a", "b", rate_mbps=5, loss=0.01)  # live, this direction only

`python -m bench.wan` is the same for the command line.
"""

from bench.wan.counters import LinkStatistics, RelayStatistics
from bench.wan.emulator import Command, Wan
from bench.wan.errors import WanError, WanUnavailable
from bench.wan.link import Link, Network, Uplink, mesh

__all__ = [
    "Command",
    "Link",
    "LinkStatistics",
    "Network",
    "RelayStatistics",
    "Uplink",
    "Wan",
    "WanError",
    "WanUnavailable",
    "mesh",
]
