"""Gaussian closure of the attention of a layer against the attention itself, and what explains the gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Attention
from ..measures import Gaussian, Particles
from ..models import AttentionLayer, Head
from ._result import Progress

__all__ = ["Closures", "affine_left_out", "closure_gap", "measure_closures", "score_spread"]

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Closures:
    """What is measured of each layer, (L,) each; gaps of the velocity are E|Gamma - approximation|^2 / E|Gamma|^2.

    Attributes
    ----------
    model : |Gamma - measured| / |measured|, attention of the library against the output of the model
    gap : gap of the Gaussian closure, approximation b + M (x - m)
    mean_gap : |E Gamma - b| / |E Gamma|, difference of the two dm/dt
    cov_gap : relative difference of the two dS/dt, Frobenius norm
    cosine : cosine of the angle between Gamma and the closure in L2(mu)
    gaussian, gaussian_spread : mean and standard deviation over draws of the gap of the same attention for n
        tokens drawn from the Gaussian of the cloud's moments, each against the closure at its own moments
    constant : gap of the best constant, Var Gamma / E|Gamma|^2
    affine : gap of the best affine map, each token predicted from the others
    spread : root mean square over tokens and heads of the standard deviation of the scores of a token
    relative_size : (E|Gamma|^2)^(1/2) / (E|x|^2)^(1/2)
    """

    model: Floats
    gap: Floats
    mean_gap: Floats
    cov_gap: Floats
    cosine: Floats
    gaussian: Floats
    gaussian_spread: Floats
    constant: Floats
    affine: Floats
    spread: Floats
    relative_size: Floats


def measure_closures(layers: Sequence[AttentionLayer], draws: int, seed: int, progress: Progress) -> Closures:
    """Measure each layer; `progress` gets fractions of this part."""
    rows = []
    for k, layer in enumerate(layers):
        progress(f"closure of layer {k}", k / len(layers))
        rows.append(_measure(layer, draws, seed + k))
    return Closures(**{f.name: np.array([row[f.name] for row in rows]) for f in fields(Closures)})


def _measure(layer: AttentionLayer, draws: int, seed: int) -> dict[str, float]:
    attention, cloud = layer.attention(), layer.homogeneous_tokens()
    found, velocity = closure_gap(attention, cloud)
    output = torch.as_tensor(layer.output)
    found["model"] = float((velocity[:, :-1] - output).norm() / output.norm())
    drawn = cloud.to_gaussian()
    samples = [closure_gap(attention, _drawn(cloud, drawn, seed * draws + k))[0]["gap"] for k in range(draws)]
    found["gaussian"], found["gaussian_spread"] = float(np.mean(samples)), float(np.std(samples))
    found["affine"] = affine_left_out(layer.tokens.x_t, velocity)
    found["spread"] = float(np.sqrt(np.mean([score_spread(h, layer.tokens) ** 2 for h in layer.heads])))
    found["relative_size"] = float(velocity.norm() / layer.tokens.x_t.norm())
    return found


def _drawn(cloud: Particles, gaussian: Gaussian, seed: int) -> Particles:
    """As many tokens as the cloud has, drawn from its Gaussian, with weights 1/n."""
    L = gaussian.factor_t
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(cloud.n, L.shape[-1], generator=generator, dtype=L.dtype)
    return Particles.unchecked(gaussian.mean_t + z @ L.mT)


def closure_gap(attention: Attention, cloud: Particles) -> tuple[dict[str, float], Tensor]:
    r"""Gaps of velocity, dm/dt and dS/dt of the closure at the cloud's own moments, and Gamma at the tokens.

    Gamma_i is the attention on the particles, b + M (x_i - m) that of the Gaussian of equal moments. On
    particles dm/dt = E Gamma and dS/dt = Cov(Gamma, x) + Cov(x, Gamma); in the closure b and M S + S M^T.
    """
    x, w = cloud.x_t, cloud.weights_t.unsqueeze(-1)
    gaussian = cloud.to_gaussian()
    centred = x - gaussian.mean_t
    velocity = attention.raw_velocity(x, cloud.weights_t)
    b, M = attention.raw_affine(gaussian.mean_t, gaussian.factor_t)
    closure = b + centred @ M.mT
    size = (w * velocity.square()).sum()
    mean = (w * velocity).sum(0)
    both = (w * velocity * closure).sum() / (size * (w * closure.square()).sum()).sqrt()
    cross = (w * (velocity - mean)).mT @ centred
    MS = M @ gaussian.cov_t
    rate, closed = cross + cross.mT, MS + MS.mT
    found = {
        "gap": (w * (velocity - closure).square()).sum() / size,
        "mean_gap": (mean - b).norm() / mean.norm(),
        "cov_gap": (rate - closed).norm() / rate.norm(),
        "cosine": both,
        "constant": (w * (velocity - mean).square()).sum() / size,
    }
    return {name: float(v) for name, v in found.items()}, velocity


def affine_left_out(x: Tensor, velocity: Tensor) -> float:
    r"""Share of E|Gamma|^2 that the best affine map of the tokens leaves, each token predicted from the others.

    Ridge regression of Gamma (n, q) on x (n, d) with a free intercept; the prediction of token i by the fit to
    the others has error (Gamma_i - fit_i) / (1 - H_ii), H the hat matrix, so one eigendecomposition of the
    centred Gram matrix gives the leave-one-out error of every ridge parameter. The least of them is taken.
    (With n <= d + 1 tokens in general position an affine map fits any Gamma exactly: the error within the
    sample says nothing there.)
    """
    n = len(x)
    z = x - x.mean(0)
    g, U = torch.linalg.eigh(z @ z.mT)
    g = g.clamp_min(0.0)
    centred = velocity - velocity.mean(0)
    coefficients = U.mT @ centred
    best = torch.inf
    for ridge in float(g[-1]) * 10.0 ** np.arange(-12.0, 4.01, 0.5):
        gain = g / (g + ridge)
        leverage = 1.0 / n + (U.square() * gain).sum(1)
        error = (centred - U @ (gain[:, None] * coefficients)) / (1 - leverage).clamp_min(1e-12)[:, None]
        best = min(best, float(error.square().sum()))
    return best / float(velocity.square().sum())


def score_spread(head: Head, tokens: Particles) -> float:
    """Root mean square over queries of the standard deviation over keys of the score of a head.

    For a query x it is (q^T K S K^T q / k)^(1/2), q = Q x + b_Q and S the covariance of the tokens.
    """
    x, w = tokens.x_t, tokens.weights_t
    query = x @ torch.as_tensor(head.Q).mT
    if head.b_Q is not None:
        query = query + torch.as_tensor(head.b_Q)
    keys = torch.as_tensor(head.K) @ tokens.factor_t
    return head.scale * float((w * (query @ keys).square().sum(-1)).sum().sqrt())
