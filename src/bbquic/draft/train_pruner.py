"""Training of the pruner (§7.2) on what was observed: a proxy head for each depth, and the MLP behind it.

The projection of the embedding is shared by all depths: it is learnt with all adapters, a depth drawn for
each step; then each adapter is learnt to the end. Proxies learn KL(p ‖ p̂) to the model's p (its likeliest
tokens), over the common tokens, those that are likely anywhere in the batch and some at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from bbquic.draft.observe import LIKELIEST, Observed
from bbquic.draft.pruner import Pruner, PrunerPart

LIKELY = 16  # tokens of each distribution in a batch that all its rows are told apart from
RANDOM = 512  # tokens beside these
GUESSED = 6  # tokens at a position that stand for a drafter's guesses
SCALE = 10.0  # of the MLP's inputs, logarithms in nats, at the start
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """rank: of the proxies. common: tokens that p̂ is over. hidden: of the MLP. steps: of `batch` positions,
    for each depth, and half as many before them for what is shared. top: a guess is right where it is among
    so many of the model's likeliest tokens; 1: where a greedy answer would go on. keeps: the share of right
    guesses that the threshold lets pass, on held-out positions. held_out: share of the sequences."""

    rank: int = 64
    common: int = 4096
    hidden: int = 16
    steps: int = 300
    batch: int = 256
    rate: float = 4e-3
    top: int = 1
    keeps: float = 0.98
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.rank, self.common, self.hidden, self.steps, self.batch, self.top)
        if least < 1 or self.top > LIKELIEST or not 0 < self.held_out < 1 or not 0 < self.keeps < 1:
            raise ValueError(f"options of training that make no sense: {self}")


@dataclass(frozen=True, slots=True)
class Score:
    """Of a depth, on held-out positions: KL(p ‖ p̂) in nats, how often the likeliest tokens agree, and the
    mean chance that the MLP gives to guesses that are right, and to others."""

    divergence: float
    agreement: float
    right: float
    wrong: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Tensors as `PrunerPart` names them: `shared` ones, and each depth's; float16 but for the MLP's."""

    shared: Mapping[str, torch.Tensor]
    parts: Mapping[int, Mapping[str, torch.Tensor]]
    threshold: float
    scores: Mapping[int, Score] = field(default_factory=dict)


class Trainer:
    """One training, in this thread. The same observations and options give the same tensors."""

    def __init__(
        self, observed: Observed, embedding: torch.Tensor, options: TrainOptions, progress: Progress
    ) -> None:
        """`embedding` [V, D] is the model's. Raises: ValueError for too few sequences to hold some out."""
        self._seen = observed
        self._embedding = embedding.float()
        self._options = options
        self._progress = progress
        self._drawn = torch.Generator().manual_seed(options.seed)
        sequences = int(observed.sequence.max()) + 1
        held = max(1, round(options.held_out * sequences))
        if held >= sequences:
            raise ValueError(f"{sequences} sequences are too few to hold some out")
        chosen = torch.randperm(sequences, generator=self._drawn)[:held]
        is_held = torch.isin(observed.sequence, chosen)
        self._train, self._held = (~is_held).nonzero()[:, 0], is_held.nonzero()[:, 0]
        self._common = self._most_common()

    def train(self) -> Trained:
        depths = sorted(self._seen.hidden)
        factor, first = self._first_guess(depths[len(depths) // 2])
        adapters = {depth: first.clone() for depth in depths}
        self._fit_together(factor, adapters)
        factor = factor.half()  # as it will be stored
        for place, depth in enumerate(depths):
            self._progress(f"proxy behind {depth} blocks", place, len(depths))
            self._fit(depth, factor.float(), adapters[depth])
        stored = {depth: adapter.half() for depth, adapter in adapters.items()}
        shared = {"factor": factor, "common": self._common.int()}
        guessed = self._guessed(factor.float(), stored)
        parts, scores, thresholds = {}, {}, []
        for place, depth in enumerate(depths):
            self._progress(f"retention behind {depth} blocks", place, len(depths))
            parts[depth], scores[depth], threshold = self._judge(depth, shared, stored[depth], guessed)
            thresholds.append(threshold)
        return Trained(shared, parts, sorted(thresholds)[len(thresholds) // 2], scores)

    def _most_common(self) -> torch.Tensor:
        """The tokens with most of all distributions, rising."""
        seen, options = self._seen, self._options
        mass = torch.zeros(len(self._embedding))
        mass.scatter_add_(0, seen.likeliest.long().flatten(), seen.chances.float().flatten())
        return mass.topk(min(options.common, len(mass))).indices.sort().values

    def _first_guess(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding's directions in which what is said differs most; and hidden states as they are, at a
        strength at which logits spread by 1."""
        seen, rank = self._seen, min(self._options.rank, self._embedding.shape[1])
        mass = torch.zeros(len(self._embedding))
        mass.scatter_add_(0, seen.likeliest.long().flatten(), seen.chances.float().flatten())
        mass /= mass.sum()
        centred = self._embedding - mass @ self._embedding
        spread = (centred * mass[:, None]).T @ centred
        factor = torch.linalg.eigh(spread).eigenvectors[:, -rank:].clone()
        low = seen.hidden[depth][self._train[:256]].float() @ factor
        logits = low @ (self._embedding[self._common] @ factor).T
        return factor, factor.T / logits.std()

    def _fit_together(self, factor: torch.Tensor, adapters: Mapping[int, torch.Tensor]) -> None:
        """Train the factor, and all adapters as far as it takes them, in place."""
        options, depths = self._options, sorted(adapters)
        shared, *own = (torch.optim.Adam([one], lr=options.rate) for one in (factor, *_in_order(adapters)))
        steps = len(depths) * options.steps // 2
        for step in range(steps):
            self._progress("proxies", step, steps)
            place = int(torch.randint(len(depths), (1,), generator=self._drawn))
            self._step(depths[place], factor, adapters[depths[place]], (shared, own[place]), step / steps)

    def _fit(self, depth: int, factor: torch.Tensor, adapter: torch.Tensor) -> None:
        """Train an adapter to the end, in place."""
        own, steps = torch.optim.Adam([adapter], lr=self._options.rate), self._options.steps
        for step in range(steps):
            self._step(depth, factor, adapter, (own,), step / steps)

    def _step(
        self,
        depth: int,
        factor: torch.Tensor,
        adapter: torch.Tensor,
        optimisers: Sequence[torch.optim.Adam],
        done: float,
    ) -> None:
        """One batch; rates fall along a cosine."""
        trained = [group["params"][0] for one in optimisers for group in one.param_groups]
        rows = self._train[torch.randint(len(self._train), (self._options.batch,), generator=self._drawn)]
        for one in trained:
            one.requires_grad_(True)
        loss = self._divergence(rows, self._seen.hidden[depth][rows].float() @ adapter.T, factor)
        torch.autograd.backward(loss)
        for one in trained:
            one.requires_grad_(False)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self._options.rate * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
            optimiser.step()
            optimiser.zero_grad()

    def _divergence(self, rows: torch.Tensor, low: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of p̂ to p at some positions, over the tokens that are told apart there."""
        likeliest, chances = self._seen.likeliest[rows].long(), self._seen.chances[rows].float()
        other = torch.randint(len(self._embedding), (RANDOM,), generator=self._drawn)
        tokens = torch.unique(torch.cat((self._common, likeliest[:, :LIKELY].flatten(), other)))
        place = torch.full((len(self._embedding),), -1)
        place[tokens] = torch.arange(len(tokens))
        logits = low @ (self._embedding[tokens] @ factor).T
        where = place[likeliest]
        chances = chances * (where >= 0)
        chances = chances / chances.sum(-1, keepdim=True)
        said = logits.log_softmax(-1).gather(1, where.clamp_min(0))
        return -(chances * said).sum(-1).mean()

    def _guessed(self, factor: torch.Tensor, adapters: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What may be guessed at each position [N, 3 GUESSED]: what a proxy behind few blocks finds likely,
        as a small drafter would, what the model does, and tokens at random."""
        depth = min(adapters, key=lambda one: abs(one - max(adapters) // 6))
        adapter, common = adapters[depth].float(), self._embedding[self._common] @ factor
        hidden = self._seen.hidden[depth]
        found = [
            self._common[(rows.float() @ adapter.T @ common.T).topk(GUESSED).indices]
            for rows in torch.split(hidden, 2048)
        ]
        chosen = torch.randint(len(self._common), (len(hidden), GUESSED), generator=self._drawn)
        said = self._seen.likeliest[:, :GUESSED].long()
        return torch.cat((torch.cat(found), said, self._common[chosen]), dim=1)

    def _judge(
        self, depth: int, shared: Mapping[str, torch.Tensor], adapter: torch.Tensor, guessed: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], Score, float]:
        """Train a depth's MLP: its part, its worth, and the threshold that keeps as much as is wanted."""
        options, (width, hidden) = self._options, (self._embedding.shape[1], self._options.hidden)
        mlp = _new_mlp(hidden, self._drawn)
        part = dict(zip(("mlp.0.weight", "mlp.0.bias", "mlp.1.weight", "mlp.1.bias"), mlp, strict=True))
        part["adapter"] = adapter
        pruner = Pruner(
            PrunerPart.of({**shared, **part}, width=width, vocabulary=len(self._embedding)), self._embedding
        )
        rows = self._train[
            torch.randperm(len(self._train), generator=self._drawn)[: options.steps * options.batch // 4]
        ]
        features, right, _ = self._examples(pruner, depth, rows, guessed)
        for one in mlp:
            one.requires_grad_(True)
        optimiser = torch.optim.Adam(mlp, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.steps * 2)
        for _ in range(options.steps * 2):
            some = torch.randint(len(right), (4 * options.batch,), generator=self._drawn)
            loss = nn.functional.binary_cross_entropy_with_logits(
                _behind(mlp, features[some]), right[some].float()
            )
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
        for one in mlp:
            one.requires_grad_(False)
        features, right, is_drafted = self._examples(pruner, depth, self._held, guessed)
        chances = _behind(mlp, features).sigmoid()
        score = self._score(depth, shared["factor"].float(), adapter.float(), chances, right)
        reached = chances[right & is_drafted].sort().values
        threshold = float(reached[int((1 - options.keeps) * len(reached))]) if len(reached) else 0.0
        return part, score, threshold

    def _examples(
        self, pruner: Pruner, depth: int, rows: torch.Tensor, guessed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features [G, 3] of what may be guessed at some positions, whether each is right, and whether a
        drafter might have guessed it."""
        said = self._seen.likeliest[rows, : self._options.top].long()
        tokens = guessed[rows]
        right = (tokens[:, :, None] == said[:, None, :]).any(-1)
        node = torch.arange(len(rows))[:, None].expand_as(tokens)
        with torch.inference_mode():
            found = [
                pruner.features(
                    self._seen.hidden[depth][rows[part]], node[: len(part)].flatten(), tokens[part].flatten()
                )
                for part in torch.split(torch.arange(len(rows)), 2048)
            ]
        is_drafted = torch.arange(tokens.shape[1]).expand_as(tokens) < GUESSED
        return torch.cat(found).clone(), right.flatten(), is_drafted.flatten()

    def _score(
        self,
        depth: int,
        factor: torch.Tensor,
        adapter: torch.Tensor,
        chances: torch.Tensor,
        right: torch.Tensor,
    ) -> Score:
        """On some of the held-out positions, the whole vocabulary."""
        rows = self._held[:: max(1, len(self._held) // 1000)]
        logits = self._seen.hidden[depth][rows].float() @ adapter.T @ (self._embedding @ factor).T
        likeliest, p = self._seen.likeliest[rows].long(), self._seen.chances[rows].float()
        p = p / p.sum(-1, keepdim=True)
        said = logits.log_softmax(-1).gather(1, likeliest)
        divergence = (p * (p.clamp_min(1e-9).log() - said)).sum(-1).mean()
        agreement = (logits.argmax(-1) == likeliest[:, 0]).float().mean()
        return Score(
            float(divergence), float(agreement), float(chances[right].mean()), float(chances[~right].mean())
        )


def _in_order(adapters: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    return [adapters[depth] for depth in sorted(adapters)]


def _new_mlp(hidden: int, drawn: torch.Generator) -> list[torch.Tensor]:
    first = torch.randn(hidden, 3, generator=drawn) / SCALE
    second = torch.randn(1, hidden, generator=drawn) / math.sqrt(hidden)
    return [first, torch.randn(hidden, generator=drawn), second, torch.zeros(1)]


def _behind(mlp: list[torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """Logits [G] of the chance that guesses stay, as `Pruner.stays` has them."""
    first, first_bias, second, second_bias = mlp
    between = nn.functional.silu(nn.functional.linear(features, first, first_bias))
    return nn.functional.linear(between, second, second_bias)[:, 0]
