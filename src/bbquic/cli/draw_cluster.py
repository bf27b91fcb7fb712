"""A cluster that one is not driving, as tables and as lines for scripts. Pure text."""

from __future__ import annotations

from bbquic.cli.draw_loop import Table, blocks, hop_table, link_rate, loss, queues, ratio, stage_table
from bbquic.cli.figures import UNKNOWN, duration, milliseconds, printable, share, throughput
from bbquic.runtime.telemetry import ClusterStatistics, NodeStatistics
from bbquic.units import Seconds

SNAPSHOT_COLUMNS = (
    *(
        "node",
        "state",
        "activity",
        "job",
        "blocks",
        "steps/s",
        "busy",
        "bubble",
        "compute",
        "queue",
        "queues",
    ),
    *("rtt", "clock", "hop", "link", "hop rtt", "hop loss", "carries", "ratio"),
)


def node_table(cluster: ClusterStatistics) -> Table:
    """A row for each node: what it is at, how far away, and how its clock stands to ours."""
    return Table(
        ("node", "rtt", "clock", "steps/s", "doing"),
        tuple(map(_node_row, cluster.nodes)),
        ("steps/s", "clock", "rtt"),
        frozenset({"node", "doing"}),
    )


def cluster_tables(cluster: ClusterStatistics) -> list[Table]:
    """Nodes, then their stages and hops where there are any."""
    stages = [node.stage for node in cluster.nodes if node.stage is not None]
    hops = [node.hop for node in cluster.nodes if node.hop is not None]
    tables = [node_table(cluster)]
    if stages:
        tables.append(stage_table(stages))
    if hops:
        tables.append(hop_table(hops))
    return tables


def limit_lines(cluster: ClusterStatistics) -> list[str]:
    return [f"job {printable(job)}: {printable(sentence)}" for job, sentence in cluster.limits]


def snapshot_lines(cluster: ClusterStatistics) -> list[str]:
    """The whole as lines for scripts: fields between tabs, the first line names them, - is not known."""
    rows = [SNAPSHOT_COLUMNS, *(_snapshot_row(node) for node in cluster.nodes)]
    return ["\t".join(row) for row in rows]


def clock(node: NodeStatistics) -> str:
    """The node's clock minus ours: "+12.3 ±0.4 ms". Clocks count from when a machine started, so that
    those of two machines may be days apart."""
    if node.offset is None or node.uncertainty is None:
        return UNKNOWN
    sure = f"±{node.uncertainty * 1000:.1f} ms"
    if abs(node.offset) < 1:
        return f"{node.offset * 1000:+.1f} {sure}"
    return f"{'-' if node.offset < 0 else '+'}{duration(Seconds(abs(node.offset)))} {sure}"


def _node_row(node: NodeStatistics) -> tuple[str, ...]:
    if node.trouble is not None:
        return (
            printable(node.name),
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            f"does not answer: {printable(node.trouble)}",
        )
    doing = f"{printable(node.activity or UNKNOWN)} for {duration(node.since)}"
    job = "" if node.job is None else f" (job {printable(node.job)})"
    return (printable(node.name), milliseconds(node.rtt), clock(node), _rate(node), f"{doing}{job}")


def _snapshot_row(node: NodeStatistics) -> tuple[str, ...]:
    stage, hop = node.stage, node.hop
    lanes = (UNKNOWN,) * 6
    if stage is not None:
        compute, queue = milliseconds(stage.compute), milliseconds(stage.queue)
        lanes = (blocks(stage), share(stage.busy), share(stage.bubble), compute, queue, queues(stage))
    link = (UNKNOWN,) * 6
    if hop is not None:
        carries = throughput(hop.bytes_per_second)
        name = f"-> {printable(hop.target)}"
        link = (name, link_rate(hop), milliseconds(hop.rtt), loss(hop), carries, ratio(hop))
    state = "up" if node.trouble is None else f"down: {printable(node.trouble)}"
    return (
        *(printable(node.name), state, printable(node.activity or UNKNOWN), printable(node.job or UNKNOWN)),
        *(lanes[0], _rate(node), *lanes[1:], milliseconds(node.rtt), clock(node), *link),
    )


def _rate(node: NodeStatistics) -> str:
    return UNKNOWN if node.steps_per_second is None else f"{node.steps_per_second:.1f}"
