"""How others place blocks, from their papers: what the planner is compared with.

Each is a function from a cluster, a model and a job to a `Layout`, or None where it finds none that fits.
They decide which node holds which blocks, in which order (`placement`). Batch, micro-batches, codecs and the
coordinator's place are then chosen for that placement by the planner's own search (`settle`), so that the
placement alone differs. Petals also sends hidden states by way of the client; that is not counted against it.
"""

from bench.baselines.even import even
from bench.baselines.helix import helix
from bench.baselines.petals import petals

__all__ = ["even", "helix", "petals"]
