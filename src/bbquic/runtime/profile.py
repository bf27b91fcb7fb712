"""A node's profile as it travels and as it is kept: `plan.cluster.NodeProfile` with bounds on every figure.

Known without loading torch: the command reads profiles, and only nodes make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from bbquic.plan.breakeven import Way
from bbquic.plan.cluster import AttentionCost, CodecSpeed, Curve, NodeProfile
from bbquic.units import Bytes, BytesPerSecond, Seconds

Size = Annotated[float, Meta(ge=0, le=2**40)]  # rows or tokens
Duration = Annotated[float, Meta(ge=0, le=1e6)]  # seconds; more is damage
Memory = Annotated[int, Meta(ge=0, le=2**60)]  # bytes
Rate = Annotated[float, Meta(gt=0, le=1e15)]  # bytes/s
Share = Annotated[float, Meta(ge=0, le=4)]  # of a message's bytes that a codec leaves

WirePoints = Annotated[tuple[tuple[Size, Duration], ...], Meta(min_length=1, max_length=64)]
WireAttention = tuple[Duration, Duration, Duration]  # fixed, row, key
WireCodec = tuple[Share, Duration, Duration]  # ratio, seconds a raw byte to encode and to decode


class WireProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of a NodeProfile but its name and price, which are the asker's matter.

    Raises: ValueError where the sizes of a curve do not rise.
    """

    mlp: WirePoints
    attention: WireAttention
    embed: WirePoints
    head: WirePoints
    memory: Memory
    overhead: Duration
    attention_host: WireAttention | None = None
    attention_prompt: WireAttention | None = None
    host_memory: Memory = 0
    offloads: bool = False
    host_beside: bool = True
    to_host: Rate | None = None
    to_device: Rate | None = None
    codecs: Annotated[dict[Literal["H8", "REC"], WireCodec], Meta(max_length=2)] = {}

    def __post_init__(self) -> None:
        for points in (self.mlp, self.embed, self.head):
            Curve(points)

    @classmethod
    def of(cls, profile: NodeProfile) -> WireProfile:
        host, prompt = profile.attention_host, profile.attention_prompt
        return cls(
            mlp=profile.mlp.points,
            attention=_triple(profile.attention),
            embed=profile.embed.points,
            head=profile.head.points,
            memory=profile.memory,
            overhead=profile.overhead,
            attention_host=None if host is None else _triple(host),
            attention_prompt=None if prompt is None else _triple(prompt),
            host_memory=profile.host_memory,
            offloads=profile.offloads,
            host_beside=profile.host_beside,
            to_host=profile.to_host,
            to_device=profile.to_device,
            codecs={
                "H8" if way is Way.H8 else "REC": (speed.ratio, speed.encode, speed.decode)
                for way, speed in profile.codecs.items()
            },
        )

    def plain(self, name: str, price: float | None = None) -> NodeProfile:
        """The profile of the node `name`, which costs `price` dollars an hour."""
        return NodeProfile(
            name=name,
            mlp=Curve(self.mlp),
            attention=AttentionCost(*self.attention),
            embed=Curve(self.embed),
            head=Curve(self.head),
            memory=Bytes(self.memory),
            overhead=Seconds(self.overhead),
            attention_host=None if self.attention_host is None else AttentionCost(*self.attention_host),
            attention_prompt=None if self.attention_prompt is None else AttentionCost(*self.attention_prompt),
            host_memory=Bytes(self.host_memory),
            offloads=self.offloads,
            host_beside=self.host_beside,
            to_host=None if self.to_host is None else BytesPerSecond(self.to_host),
            to_device=None if self.to_device is None else BytesPerSecond(self.to_device),
            codecs={Way(way): CodecSpeed(*figures) for way, figures in self.codecs.items()},
            price=price,
        )


def _triple(cost: AttentionCost) -> WireAttention:
    return cost.fixed, cost.row, cost.key


def shown(profile: NodeProfile) -> Sequence[str]:
    """A profile in words, for logs: milliseconds a block by tokens, and the rest."""
    costs = (
        ("attention", profile.attention),
        ("attention in host memory", profile.attention_host if profile.offloads else None),
        ("attention of prompts", profile.attention_prompt),
    )
    curves = (("block", profile.mlp), ("embedding", profile.embed), ("head", profile.head))
    lines = [
        f"{what}: " + ", ".join(f"{size:.0f}: {seconds * 1e3:.3g} ms" for size, seconds in curve.points)
        for what, curve in curves
    ]
    lines += [
        f"{what}: {cost.fixed * 1e6:.3g} us + {cost.row * 1e6:.3g} us a row + {cost.key * 1e9:.3g} ns a key"
        for what, cost in costs
        if cost is not None
    ]
    lines.append(f"overhead: {profile.overhead * 1e3:.3g} ms")
    lines += [
        f"{way}: leaves {codec.ratio:.0%}, {codec.encode * 1e9:.3g} and {codec.decode * 1e9:.3g} ns a byte"
        for way, codec in profile.codecs.items()
    ]
    return lines
