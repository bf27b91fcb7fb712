"""Where the tokens of one slot lie once drafts were rejected: compact, holes, appended (paper, §7.2). Pure.

    0 ........ compact ...... hole ...... tail and drafts ...... end ....... capacity
    | all are seen |   dropped drafts   | seen, out of place |  | unused        |

A tree's tokens are drafts until the slot's next row says which were accepted. Those join the tail, the others
are a hole from then on, and no row sees them again. Compaction moves the tail to where its positions are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bbquic.kv.ranges import SlotCopy, SlotRange
from bbquic.kv.rows import Layout


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree in the cells from `start` on: ids of the nodes, rising from the root's 0, and of their parents.

    Ids are those of the tree before it was pruned, so one may be missing.
    """

    start: int
    nodes: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.nodes)

    def cells(self, path: Sequence[int]) -> tuple[int, ...]:
        """Where the nodes of a path lie. Raises: ValueError unless it leads from the root to a child each."""
        places = {node: place for place, node in enumerate(self.nodes)}
        if not path or path[0] != 0:
            raise ValueError(f"{tuple(path)} does not begin at the root")
        for node, parent in zip(path[1:], path, strict=False):
            if node not in places:
                raise ValueError(f"node {node} is not held here")
            if self.parents[places[node]] != parent:
                raise ValueError(f"node {node} is not a child of node {parent}")
        return tuple(self.start + places[node] for node in path)

    @property
    def indices(self) -> tuple[int, ...]:
        """Each node's parent by its place among the nodes."""
        places = {node: place for place, node in enumerate(self.nodes)}
        return tuple(places[parent] for parent in self.parents)


@dataclass(frozen=True, slots=True)
class SlotCompaction:
    """In one slot, what lies in the cells `sources` goes to `target` and on, as if all at once."""

    where: SlotRange
    slot: int
    sources: tuple[int, ...]
    target: int


Moving = SlotCopy | SlotCompaction  # what happens to KV between two packs


@dataclass(frozen=True, slots=True)
class Regions:
    """One slot's cells: [0, compact) hold the first tokens, `tail` the next ones in order, none in its place.

    `drafts` are not tokens of the sequence yet. Every cell of these lies behind `compact`, and the drafts
    behind all cells that the tail would be moved to.
    """

    compact: int = 0
    tail: tuple[int, ...] = ()
    drafts: Drafts | None = None

    @property
    def length(self) -> int:
        """Tokens of the sequence, drafts not counted."""
        return self.compact + len(self.tail)

    @property
    def end(self) -> int:
        """Cells from here on are unused."""
        stop = self.compact if self.drafts is None else self.drafts.stop
        return max(stop, max(self.tail, default=-1) + 1)

    @property
    def is_plain(self) -> bool:
        """Whether each token lies in the cell of its position, and nothing else does."""
        return not self.tail and self.drafts is None

    def accepted(self, path: Sequence[int]) -> Regions:
        """What is left once the drafts are decided: those of `path`, ids from the root on, are tokens now.

        Raises: ValueError when there are no drafts, or `path` is not a path of nodes that are held.
        """
        if self.drafts is None:
            raise ValueError("there is no tree to accept of")
        return Regions(self.compact, self.tail)._with_tail(self.drafts.cells(path))

    def _with_tail(self, cells: tuple[int, ...]) -> Regions:
        """More tokens, in order; those that lie where their positions are belong to the compact region."""
        tail, compact = self.tail + cells, self.compact
        settled = 0
        while settled < len(tail) and tail[settled] == compact + settled:
            settled += 1
        return Regions(compact + settled, tail[settled:])

    def place(self, count: int, capacity: int) -> int | None:
        """The first of `count` cells in a row for the next tokens, or None where that takes a compaction.

        In the hole before the tail where it is long enough, which keeps low what has to be read; else at the
        end. So where rows have at most n tokens, and holes are closed beside each, a place is always found
        while the slot has 3 n cells more than tokens: one for a hole that was too short, one for the tail.
        """
        assert self.drafts is None, "a place is found once the drafts are decided"
        if self.tail and self.length + count <= min(self.tail):
            return self.length
        return self.end if self.end + count <= capacity else None

    def appended(self, start: int, count: int) -> Regions:
        """With a plain row's tokens, which are the sequence's at once, in the cells from `start` on."""
        return self._with_tail(tuple(range(start, start + count)))

    def drafted(self, start: int, nodes: tuple[int, ...], parents: tuple[int, ...]) -> Regions:
        """With a tree's, which are drafts."""
        return replace(self, drafts=Drafts(start, nodes, parents))

    def layout(self, start: int, parents: tuple[int, ...] | None) -> Layout:
        """How a row lies that is put at `start` next."""
        return Layout(self.compact, start, self.tail, parents)

    def compacted(self) -> tuple[Regions, tuple[int, ...], int]:
        """Without holes before the drafts: the state then, and which cells go where for it, in order."""
        return Regions(self.length, (), self.drafts), self.tail, self.compact

    def squeezed(self) -> tuple[Regions, tuple[int, ...], int]:
        """As `compacted`, with the drafts too: the slot's first cells are all that it holds."""
        drafts = self.drafts
        if drafts is None:
            return self.compacted()
        sources = self.tail + tuple(range(drafts.start, drafts.stop))
        if drafts.start == self.length and not self.tail:
            sources = ()
        return Regions(self.length, (), replace(drafts, start=self.length)), sources, self.compact
