"""Which particle goes where: matchings and plans between clouds for the twisted metric, improved by exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..errors import InvalidInput
from ..numerics.path_batch import rough_lengths
from ..numerics.paths import Path, gauss
from ..numerics.tilted import log_interaction
from ..numerics.transport import transport_plan
from ._twisted_particles import cloud_path, flat_speed, path_scale

__all__ = ["Labels", "label", "matched_path"]

_ROUNDS = 4
_ROUGH = 120
"""Iterations of a rough path: those that need more have lengths of no use in comparisons."""
_MANY = 64
_FIELD_LIMIT = 256
"""Particles up to which plans are improved under the field of a path (a cost is a sum over all of them)."""

_ALL = 6
"""Particles up to which all n! matchings are compared."""
_SIEVES = ((12, 0.4, 60), (80, 0.1, 8))
"""Iterations, margin in the log length and number of matchings kept, one sieve after another."""
_CONTESTS = ((8, 0.1, 4), (16, 0.02, 3))
"""Degree, margin in the log length and number of matchings compared again, one contest after another."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Pairs: mass[k] moves from x[rows[k]] to y[cols[k]]; `permutation` where these are n equal or fixed masses."""

    rows: Tensor
    cols: Tensor
    mass: Tensor
    permutation: bool

    @classmethod
    def matching(cls, cols: np.ndarray[Any, Any] | Tensor, mass: Tensor) -> Labels:
        """All of x_i goes to y[cols[i]]."""
        index = torch.as_tensor(cols, device=mass.device)
        return cls(torch.arange(len(mass), device=mass.device), index, mass, True)


Cloud = tuple[Tensor, Tensor]


def label(mu: Cloud, nu: Cloud, A: Tensor, Dinv: Tensor, matching: str) -> list[Labels]:
    """First guesses of the pairs; one where it is known to be right."""
    (x, wx), (y, wy) = mu, nu
    same = x.shape == y.shape and bool(torch.allclose(wx, wy, rtol=1e-12, atol=0.0))
    if matching == "identity":
        if not same:
            raise InvalidInput("matching 'identity' needs clouds of equal size and weights")
        return [Labels.matching(torch.arange(len(x)), wx)]
    uniform = same and bool((wx == wx[0]).all())
    if x.shape[-1] == 1 and uniform:
        # On the line particles never cross: the monotone matching is the only candidate.
        order = torch.empty_like(x[:, 0], dtype=torch.long)
        order[x[:, 0].argsort(stable=True)] = y[:, 0].argsort(stable=True)
        return [Labels.matching(order, wx)]
    # Masses that differ: the pieces of the optimal W_2 plan are the particles that move.
    half = torch.linalg.cholesky(Dinv)
    plan = transport_plan(x @ half, wx, y @ half, wy, 2.0)
    flat = Labels(plan.rows, plan.cols, plan.mass / plan.mass.sum(), False)
    if not uniform:
        return [flat]
    guesses = [linear_sum_assignment(_chord_cost(x, wx, y, wy, A, Dinv))[1]]
    if plan.permutation and not np.array_equal(guesses[0], plan.cols.cpu().numpy()):
        guesses.append(plan.cols.cpu().numpy())
    return [Labels.matching(cols, wx) for cols in guesses]


def _chord_cost(
    x: Tensor, wx: Tensor, y: Tensor, wy: Tensor, A: Tensor, Dinv: Tensor
) -> np.ndarray[Any, Any]:
    """|x_i - y_j|^2_{D^-1} times the geometric mean of G at the two ends, scaled to stay finite."""
    half = 0.5 * (log_interaction(x, wx, A).unsqueeze(-1) + log_interaction(y, wy, A).unsqueeze(-2))
    cost = _squares(x, y, Dinv) * torch.exp((half - half.max()).clamp_min(-600.0))
    return np.asarray(cost.cpu().numpy())


def _squares(x: Tensor, y: Tensor, Dinv: Tensor) -> Tensor:
    gap = x.unsqueeze(-2) - y.unsqueeze(-3)
    return (gap @ Dinv * gap).sum(-1)


def _field_cost(path: Path, labels: Labels, x: Tensor, y: Tensor, A: Tensor, Dinv: Tensor) -> Tensor:
    """Cost of the straight line from x_i to y_j through the field G of a path, frozen, (n, m)."""
    total = torch.zeros(len(x), len(y), dtype=x.dtype, device=x.device)
    s, w = gauss(2)
    shift = float(log_interaction(x[labels.rows], labels.mass, A).max())
    for si, wi in zip(s, w, strict=True):
        keys = (path.evaluate(float(si))[0].reshape(-1, x.shape[-1]) @ A).mT
        for i in range(len(x)):  # one row of lines after another: m x k scores, in cache
            line = (1 - si) * x[i] + si * y
            total[i] += wi * (torch.exp((line @ keys - shift).clamp_max_(600.0)) @ labels.mass)
    return total * _squares(x, y, Dinv)


def _improved(cost: np.ndarray[Any, Any], labels: Labels, wx: Tensor, wy: Tensor) -> Labels | None:
    """The best plan for a cost matrix, None where the present one is."""
    mass, i, j = (t.cpu().numpy() for t in (labels.mass, labels.rows, labels.cols))
    now = float(mass @ cost[i, j])
    if labels.permutation:
        best = linear_sum_assignment(cost)[1]
        better = float(mass @ cost[i, best]) < now * (1 - 1e-12)
        return Labels.matching(best, labels.mass) if better else None
    import ot

    ends = [np.array(t.cpu().numpy()) for t in (wx, wy)]
    plan = np.asarray(
        ot.emd(ends[0], ends[1] * (ends[0].sum() / ends[1].sum()), cost / max(cost.max(), 1e-300))
    )
    if float((plan * cost).sum()) >= now * (1 - 1e-12):
        return None
    i, j = plan.nonzero()
    pieces = torch.from_numpy(plan[i, j]).to(wx)
    rows, cols = (torch.from_numpy(k).to(wx.device) for k in (i, j))
    return Labels(rows, cols, pieces / pieces.sum(), False)


def _ordered(
    x: Tensor, y: Tensor, weights: Tensor, A: Tensor, Dinv: Tensor, root: Tensor
) -> list[tuple[Labels, Tensor]]:
    """The most promising of all matchings of a few particles, best first, and their rough displacements.

    All n! paths are minimised at once, roughly first (a few iterations); those within a margin again, for longer.
    """
    n = len(x)
    perms = torch.tensor(list(permutations(range(n))), device=x.device)
    kept = perms
    for max_iter, share, most in _SIEVES:
        scale = path_scale(x, y[kept], weights, A, root)
        logs, offsets = rough_lengths(
            flat_speed(x.shape, weights, A, Dinv),
            x.reshape(-1),
            y[kept].reshape(len(kept), -1),
            scale,
            degree=4,
            max_iter=max_iter,
        )
        order = logs.argsort(stable=True)[:most]
        order = order[logs[order] <= logs[order[0]] + share]
        kept, offsets = kept[order], offsets[order]
    return [(Labels.matching(p, weights), o) for p, o in zip(kept, offsets, strict=True)]


def matched_path(
    mu: Cloud, nu: Cloud, A: Tensor, Dinv: Tensor, root: Tensor, matching: str
) -> tuple[Path, Labels, int]:
    """A rough path, its pairs, and the number of exchanges of a matching found by `matching`.

    Up to 6 particles of equal weights, all n! matchings are compared. Else the pairs are improved by the best plan
    under the field of the path (all exchanges at once) and then by exchanges of two targets, the most promising
    first, each kept if the path gets shorter. Their number is limited (all pairs for 7 particles; 24 of them beyond
    20): what is found for many may be improvable. From 257 particles on the first guess is taken.
    """
    (x, wx), (y, wy) = mu, nu

    def rough(labels: Labels, guess: Tensor | None = None, degree: int = 4) -> Path:
        degrees = (2, 4) if guess is None else (degree,)
        ends = x[labels.rows], y[labels.cols]
        return cloud_path(*ends, labels.mass, A, Dinv, root, 1e-3, degrees, guess, max_iter=_ROUGH)

    starts = label(mu, nu, A, Dinv, matching)
    if matching == "identity" or x.shape[-1] == 1 or len(starts[0].rows) < 2 or len(x) > _FIELD_LIMIT:
        path, labels = min(((rough(g), g) for g in starts), key=lambda found: found[0].log_length)
        return path, labels, 0

    if starts[0].permutation and len(x) <= _ALL:
        ordered = _ordered(x, y, wx, A, Dinv, root)
        found = [(rough(labels, guess), labels) for labels, guess in ordered]
        found += [(rough(labels), labels) for labels in starts if not _among(labels, ordered)]
        found.sort(key=lambda pair: pair[0].log_length)
        # Low degrees do not tell near lengths apart: the first few again, at higher ones.
        for degree, share, most in _CONTESTS:
            limit = found[0][0].log_length + share
            found = [pair for pair in found[:most] if pair[0].log_length <= limit]
            if len(found) > 1:
                found = [(rough(labels, path.offsets, degree), labels) for path, labels in found]
                found.sort(key=lambda pair: pair[0].log_length)
        return *found[0], 0

    def descend(labels: Labels) -> tuple[Path, Labels, int]:
        path, exchanges = rough(labels), 0
        if path.error > 1.0:  # far apart in the metric: such lengths order nothing
            return path, labels, exchanges
        for _ in range(_ROUNDS):
            cost = _field_cost(path, labels, x, y, A, Dinv).cpu().numpy()
            better = _improved(cost, labels, wx, wy)
            trial = rough(better) if better is not None else None
            if better is None or trial is None or trial.log_length >= path.log_length - 1e-9:
                break
            path, labels, exchanges = trial, better, exchanges + 1
        if labels.permutation:
            path, labels, swaps = _swapped(rough, path, labels, x, y, A, Dinv)
            exchanges += swaps
        return path, labels, exchanges

    # Which start is better shows at the end of the descent only. (Many particles: the one that knows G.)
    return min(
        (descend(g) for g in starts[: 1 if len(x) > _MANY else None]), key=lambda found: found[0].log_length
    )


def _among(labels: Labels, ordered: list[tuple[Labels, Tensor]]) -> bool:
    return any(bool((labels.cols == other.cols).all()) for other, _ in ordered)


def _trials(n: int) -> int:
    """How many exchanges of two targets to try."""
    return 3 * n if n <= 12 else max(24, 480 // n)


def _swapped(
    rough: Any, path: Path, labels: Labels, x: Tensor, y: Tensor, A: Tensor, Dinv: Tensor
) -> tuple[Path, Labels, int]:
    """Exchange two targets where the path gets shorter, the most promising pairs first, each tried once."""
    n = len(x)
    budget = _trials(n)
    swaps, tried = 0, set[tuple[int, int]]()
    while budget > 0:
        cost = _field_cost(path, labels, x, y, A, Dinv).cpu().numpy()[:, labels.cols.cpu().numpy()]
        own = np.diag(cost)
        loss = cost + cost.T - own[:, None] - own[None, :]
        pairs = sorted((float(loss[i, j]), i, j) for i in range(n) for j in range(i))
        step = False
        for _, i, j in pairs:
            if (i, j) in tried:
                continue
            if budget == 0:
                break
            budget -= 1
            tried.add((i, j))
            cols = labels.cols.clone()
            cols[[i, j]] = cols[[j, i]]
            s = 0.5 * (1 - np.cos(np.pi * np.arange(5) / 4))
            shift = torch.from_numpy(s).to(x).unsqueeze(-1) * (y[cols] - y[labels.cols]).reshape(-1)
            moved = path.evaluate_many(s)[0] - path.start + shift
            new = Labels.matching(cols, labels.mass)
            trial = rough(new, moved)
            if trial.log_length < path.log_length - 1e-7:
                path, labels, swaps, step = trial, new, swaps + 1, True
                tried.clear()
                break
        if not step:
            break
    return path, labels, swaps
