"""Which pruner a run's first stage gets: found by the command, sent with the plan.

The command finds it, so that whoever trained one, or has it with the package, has it where `bbquic generate`
runs, and nodes need nothing. A part for one depth is some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bbquic.draft.pruner_file import PrunerFile, find_pruner
from bbquic.errors import ConfigError, ModelError
from bbquic.model.directory import ModelDirectory
from bbquic.model.manifest import Manifest
from bbquic.runtime.protocol import MAX_PRUNER, PlanHeader, WirePruner

WITHOUT = "guesses are left out by draft probability alone"


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """file: a pruner, None: the one that is found for the model. threshold: the retention score below which a
    guess goes no further than the first stage; None: the pruner's own. Raises: ConfigError."""

    file: Path | None = None
    threshold: float | None = None
    is_on: bool = True

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ConfigError(f"a threshold is from 0 to 1, not {self.threshold}")
        if not self.is_on and (self.file is not None or self.threshold is not None):
            raise ConfigError(
                "nothing is pruned with --no-prune", hint="leave it out, or --pruner and --prune-threshold"
            )


def with_pruner(
    plan: PlanHeader,
    directory: ModelDirectory,
    manifest: Manifest,
    options: PruneOptions,
    report: Callable[[str], None],
) -> PlanHeader:
    """The plan with a pruner for its first stage, for a run that guesses; `report` hears which, or why none.

    It is used wherever there is one and a stage behind the first: it costs next to nothing beside a hop.
    Raises: ModelError for one that is damaged or of another model.
    """
    if not options.is_on or len(plan.stages) == 1:
        return plan
    found, depth = find_pruner(directory, manifest, options.file), plan.stages[0].stop
    if found is None:
        report(f"no learned pruner for {directory.name}: {WITHOUT}")
        return plan
    if depth not in found.depths:
        known = f"first stages of {found.words} blocks, and this one has {depth}"
        report(f"the pruner {found.path} is for {known}: {WITHOUT}")
        return plan
    threshold = found.threshold if options.threshold is None else options.threshold
    report(f"guesses with a retention score below {threshold:g} end on {plan.stages[0].node} ({found.path})")
    pruner = WirePruner(_part(found, depth), found.embedding, threshold)
    return msgspec.structs.replace(plan, pruner=pruner)


def _part(found: PrunerFile, depth: int) -> bytes:
    data = found.part(depth)
    if len(data) > MAX_PRUNER:
        raise ModelError(
            f"the pruner {found.path} has {len(data):,} bytes a depth, of {MAX_PRUNER:,} at most"
        )
    return data
