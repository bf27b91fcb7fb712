"""Clusters as they would be with one thing changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bbquic.errors import ConfigError
from bbquic.plan.cluster import Cluster, LinkProfile, NodeProfile
from bbquic.units import Bytes, BytesPerSecond


def with_link_rate(cluster: Cluster, a: str, b: str, rate: BytesPerSecond) -> Cluster:
    """The directed link a -> b at another rate. Raises: ConfigError without one, or on a rate of 0."""
    link = cluster.links.get((a, b))
    if link is None:
        raise ConfigError(f"there is no link {a} -> {b}")
    if not rate > 0:
        raise ConfigError(f"a rate of {rate} bytes a second for {a} -> {b}", hint="give one above 0")
    return Cluster(cluster.nodes, {**cluster.links, (a, b): replace(link, rate=rate)})


def with_memory(cluster: Cluster, name: str, more: int) -> Cluster:
    """So many bytes more on a node's device. Raises: ConfigError on a name that is no node's."""
    node = _known(cluster, name)
    changed = replace(node, memory=Bytes(node.memory + more))
    return Cluster(tuple(changed if one is node else one for one in cluster.nodes), cluster.links)


def without(cluster: Cluster, name: str) -> Cluster:
    """A node and its links gone. Raises: ConfigError on a name that is no node's."""
    gone = _known(cluster, name)
    links = {pair: link for pair, link in cluster.links.items() if name not in pair}
    return Cluster(tuple(node for node in cluster.nodes if node is not gone), links)


def with_node(cluster: Cluster, node: NodeProfile, links: Mapping[tuple[str, str], LinkProfile]) -> Cluster:
    """One node more, with its links in both directions. Raises: ConfigError on a name that is taken, or on
    links that are not its own."""
    if any(one.name == node.name for one in cluster.nodes):
        raise ConfigError(f"there is a node {node.name} already")
    strange = next((pair for pair in links if node.name not in pair), None)
    if strange is not None:
        raise ConfigError(f"{strange[0]} -> {strange[1]} is no link of {node.name}")
    return Cluster((*cluster.nodes, node), {**cluster.links, **links})


def _known(cluster: Cluster, name: str) -> NodeProfile:
    found = next((node for node in cluster.nodes if node.name == name), None)
    if found is None:
        names = ", ".join(node.name for node in cluster.nodes)
        raise ConfigError(f"there is no node {name}", hint=f"the nodes are {names}")
    return found
