"""A scene's processes, and layouts run on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bbquic.codec.table import LEARN_ROWS
from bbquic.plan.cluster import Layout
from bench.plan_emul.scene import Scene, home_of
from bench.stand_in.cell import CodecName, Measured, measure
from bench.stand_in.cluster import Cluster as Processes
from bench.stand_in.observed import Passed

WARM_UP = 3  # passes of a micro-batch that do not count


@dataclass(frozen=True)
class Emulation:
    """A scene while its processes run."""

    scene: Scene
    processes: Processes

    def run(
        self, layout: Layout, codec: CodecName, *, counted: int = 8, warm_up: int | None = None
    ) -> Measured:
        """Steps of a layout. A hop with a codec of its choice learns for some passes more, uncounted."""
        learns = 0 if codec == "raw" else -(-LEARN_ROWS // layout.batch)
        first = WARM_UP + learns if warm_up is None else warm_up
        cell = self.scene.cell(layout, codec=codec, warm_up=first, counted=counted)
        return measure(cell, self.processes.run(cell, home_of(layout)))

    def run_for(
        self, layout: Layout, codec: CodecName, seconds: float, most: int | None = None
    ) -> Sequence[Passed]:
        """All passes of so many seconds from the moment on that the coordinator begins.

        With `most`, the job itself decides how many micro-batches there are, so many at most.
        """
        steps = 10_000  # never reached: no step is that short
        cell = self.scene.cell(layout, codec=codec, warm_up=0, counted=steps)
        cell = replace(cell, longest=seconds, most=most)
        if most is not None:  # any of them may come to have all rows
            cell = replace(cell, stand_in=replace(cell.stand_in, most_rows=layout.batch))
        return self.processes.run(cell, home_of(layout))


@contextmanager
def emulated(scene: Scene, layouts: Iterable[Layout]) -> Iterator[Emulation]:
    """The scene with a coordinator wherever one of the layouts wants it."""
    homes = tuple(dict.fromkeys(home_of(layout) for layout in layouts))
    with scene.processes(homes) as processes:
        yield Emulation(scene, processes)
