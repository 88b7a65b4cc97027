"""Which (energy, metric) an attention is the gradient flow of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import Array, Kind, check_positive, describe, to_kind
from ..attention import (
    AffineBlock,
    Attention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    Schedule,
    SigmoidAttention,
    SinkhornAttention,
    SoftmaxAttention,
    UnnormalisedAttention,
)
from ..energies import (
    Energy,
    InteractionEnergy,
    QuadraticInteraction,
    QuadraticPotential,
    SelfTransportEnergy,
    SoftplusInteraction,
)
from ..errors import InvalidInput, NotAGradientFlow
from ..metrics import Metric, TwistedWasserstein, Wasserstein
from ..numerics.structure import find_mobility
from ..spd import symmetrise

__all__ = ["GradientStructure", "gradient_structure"]


@dataclass(frozen=True, eq=False)
class GradientStructure:
    """The pair whose gradient flow an attention is: Gamma_mu = -grad F(mu) in the metric.

    Attributes
    ----------
    energy : Energy
        The one that is descended, its sign included.
    metric : Metric
        On particles and on Gaussians.
    sign : int
        sigma in V = sigma D A (0: heads of both signs, or an affine block).
    D : array (d, d)
        The mobility; the inner product is that of D^{-1}.
    residual : float
        Relative residual of the equations that make it a gradient flow, at rounding level.
    """

    energy: Energy
    metric: Metric
    sign: int
    D: Array
    residual: float


class _Head(NamedTuple):
    """One kind of attention with its parameters: Gamma is linear in V."""

    name: str
    A: Tensor
    V: Tensor
    energy: Callable[[Any, int], Energy]
    """(A, sign) -> the energy descended, for V = sign D A."""
    twisted: bool = False


def gradient_structure(attention: Attention, *, tol: float | None = None) -> GradientStructure:
    r"""Find the energy and the metric whose gradient flow the attention is.

    For A symmetric and V = sigma D A with D symmetric positive definite (A may be singular):

    ============  ======================================  ==========================
    attention     energy descended                        metric
    ============  ======================================  ==========================
    softmax       -sigma E_A                              TwistedWasserstein(A, D)
    Sinkhorn      sigma F, F = OT(mu, mu) / 2             Wasserstein(2, D)
    unnormalised  -sigma E_A                              Wasserstein(2, D)
    linear        -sigma 1/4 E E (x^T A y)^2              Wasserstein(2, D)
    sigmoid       -sigma 1/2 E E log(1 + e^{x^T A y+b})   Wasserstein(2, D)
    affine block  -E[x^T H x / 2 + h^T x]                 Wasserstein(2, D), W = D H
    multi-head    the sum                                 the one that all heads share
    ============  ======================================  ==========================

    Heads of the Wasserstein kinds add up if one D serves them all; softmax heads only if they have one A
    (their twisted metrics differ otherwise).

    Parameters
    ----------
    attention : Attention
        With one set of parameters (no batch).
    tol : float, optional
        Largest relative residual that counts as rounding. Default: square root of the ulp of the parameters.

    Returns
    -------
    GradientStructure

    Raises
    ------
    NotAGradientFlow
        With the residual of the test, and what failed.
    InvalidInput
        Not an attention, or a batch of parameters.

    Notes
    -----
    L2 attention is never one of these: e^{-|Qx - Ky|^2} tilts mu by e^{-|Ky|^2}, so that no weight turns
    Gamma into the gradient of a first variation; its residual is |K^T K| / |K^T Q|, the size of the tilt
    against the score (it tends to 0 where L2 tends to softmax attention with 2 K^T Q). Where A is singular,
    D is free on its kernel and chosen there as the mean eigenvalue on the range.

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322, section 3; Sander, Ablin, Blondel, Peyré 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import SinkhornAttention
    >>> found = gradient_structure(SinkhornAttention(np.diag([1.0, 2.0]), -np.diag([1.0, 2.0])))
    >>> found.sign, found.D.round(12).tolist()
    (-1, [[1.0, 0.0], [0.0, 1.0]])
    """
    if not isinstance(attention, Attention):
        raise InvalidInput(f"attention must be an Attention, got {describe(attention)}")
    limit = None if tol is None else check_positive(tol, "tol")
    heads, affine = _flatten(attention, None)
    heads = _merged([h for h in heads if bool((h.V != 0).any()) and bool((h.A != 0).any())])
    if not heads:
        return _affine_only(affine, attention, limit)
    bound = max(torch.finfo(h.A.dtype).eps for h in heads) ** 0.5 if limit is None else limit
    twisted = [h for h in heads if h.twisted]
    if twisted and (len(heads) > 1 or affine):
        _reject_twisted(twisted, len(heads) > len(twisted) or bool(affine))
    D, signs, residual = _mobility(heads, bound)
    kind = attention.kind
    energy = _sum([h.energy(to_kind(symmetrise(h.A), kind), s) for h, s in zip(heads, signs, strict=True)])
    if affine:
        potential, misfit = _potential(affine, D, kind)
        if misfit > bound:
            raise NotAGradientFlow(
                f"W of the affine block is not D H for a symmetric H and the D of the heads: {misfit:.3g}",
                misfit,
            )
        energy, residual = energy + potential, max(residual, misfit)
    sign = signs[0] if len(set(signs)) == 1 else 0
    metric: Metric = Wasserstein(p=2, D=to_kind(D, kind))
    if twisted:
        metric = TwistedWasserstein(to_kind(symmetrise(heads[0].A), kind), D=to_kind(D, kind), sign=sign)
    return GradientStructure(energy, metric, sign, to_kind(D, kind), residual)


def _flatten(attention: Attention, W: Tensor | None) -> tuple[list[_Head], list[tuple[Tensor, Tensor]]]:
    """Heads with their output matrices in V, and affine blocks (W, c)."""
    name = type(attention).__name__
    if isinstance(attention, MultiHeadAttention):
        heads: list[_Head] = []
        affine: list[tuple[Tensor, Tensor]] = []
        for i, inner in enumerate(attention.heads):
            outer = W if attention.outputs_t is None else _times(W, attention.outputs_t[i])
            more, blocks = _flatten(inner, outer)
            heads, affine = heads + more, affine + blocks
        return heads, affine
    if isinstance(attention, AffineBlock):
        return [], [(_times(W, attention.W_t), attention.c_t if W is None else W @ attention.c_t)]
    if isinstance(attention, Schedule):
        raise NotAGradientFlow(
            "parameters depend on time: ask gradient_structure(schedule.at(t)) for one time"
        )
    if isinstance(attention, MaskedAttention):
        raise NotAGradientFlow(
            "a mask makes y act on x but not x on y: no energy has such a first variation", 1.0
        )
    if isinstance(attention, L2Attention):
        _reject_l2(attention)
    maker = _makers(attention)
    if maker is None:
        raise NotAGradientFlow(f"no gradient structure is known for {name}")
    A, V = (_one(getattr(attention, f"{n}_t").detach(), n) for n in ("A", "V"))
    return [_Head(name, A, _times(W, V), maker, isinstance(attention, SoftmaxAttention))], []


def _makers(attention: Attention) -> Callable[[Any, int], Energy] | None:
    if isinstance(attention, SoftmaxAttention | UnnormalisedAttention):
        return lambda A, sign: -sign * InteractionEnergy(A)
    if isinstance(attention, SinkhornAttention):
        eps, tol, most = attention.eps, attention.tol, attention.max_iter
        return lambda A, sign: sign * SelfTransportEnergy(A, eps, tol=tol, max_iter=most)
    if isinstance(attention, LinearAttention):
        return lambda A, sign: -sign * QuadraticInteraction(A)
    if isinstance(attention, SigmoidAttention):
        bias = attention.bias
        return lambda A, sign: -sign * SoftplusInteraction(A, bias)
    return None


def _one(t: Tensor, name: str) -> Tensor:
    if t.ndim != 2:
        raise InvalidInput(
            f"attention has a batch of {name} {tuple(t.shape)}: a structure is found one at a time"
        )
    return t


def _times(W: Tensor | None, V: Tensor) -> Tensor:
    return _one(V.detach() if W is None else W.to(V.dtype) @ V.detach(), "outputs")


def _merged(heads: list[_Head]) -> list[_Head]:
    """Softmax heads with one A are one head: Gamma is linear in V."""
    out: list[_Head] = []
    for h in heads:
        for i, other in enumerate(out):
            if h.twisted and other.twisted and torch.equal(h.A, other.A):
                out[i] = other._replace(V=other.V + h.V)
                break
        else:
            out.append(h)
    return out


def _mobility(heads: list[_Head], tol: float) -> tuple[Tensor, list[int], float]:
    """One D with V_h = sigma_h D A_h for every head."""
    found = [find_mobility(h.A, h.V) for h in heads]
    for h, f in zip(heads, found, strict=True):
        if f.residual > tol:
            raise NotAGradientFlow(f"{h.name} is not a gradient flow: {f.reason}", f.residual)
    if len(heads) == 1:
        return found[0].D, [found[0].sign], found[0].residual
    # D A_h = sigma_h V_h for all h, multiplied by A_h^T and summed: one equation with a PSD matrix.
    scale = [torch.linalg.matrix_norm(h.A) for h in heads]
    dtype = torch.promote_types(heads[0].A.dtype, heads[-1].A.dtype)
    pairs = list(zip(heads, found, scale, strict=True))
    left = torch.stack([(h.A @ h.A.mT / s**2).to(dtype) for h, _, s in pairs]).sum(0)
    right = torch.stack([(f.sign * h.V @ h.A.mT / s**2).to(dtype) for h, f, s in pairs]).sum(0)
    joint = find_mobility(left, right)
    residual = max(
        float(torch.linalg.matrix_norm(h.V - f.sign * joint.D.to(h.V) @ h.A) / torch.linalg.matrix_norm(h.V))
        for h, f, _ in pairs
    )
    residual = max(residual, joint.residual)
    if residual > tol:
        raise NotAGradientFlow(
            f"the heads have no common mobility D: |V_h - sign D A_h| / |V_h| = {residual:.3g} at best",
            residual,
        )
    return joint.D, [f.sign for f in found], residual


def _reject_twisted(twisted: list[_Head], mixed: bool) -> None:
    if mixed:
        raise NotAGradientFlow(
            "softmax heads descend in a twisted metric, the other heads in a Wasserstein one: none in common",
            1.0,
        )
    first = twisted[0].A
    gap = max(
        float(torch.linalg.matrix_norm(h.A.to(first) - first) / torch.linalg.matrix_norm(first))
        for h in twisted
    )
    raise NotAGradientFlow(
        f"softmax heads with different A have different twisted metrics: |A_h - A_1| / |A_1| = {gap:.3g}", gap
    )


def _reject_l2(attention: L2Attention) -> None:
    A, K, V = (
        _one(t.detach(), n) for t, n in ((attention.A_t, "Q"), (attention.K_t, "K"), (attention.V_t, "V"))
    )
    tilt = float(torch.linalg.matrix_norm(K.mT @ K) / torch.linalg.matrix_norm(A).clamp_min(1e-300))
    found = find_mobility(A, V)
    reason = f"its kernel tilts mu by e^(-|Ky|^2), |K^T K| / |K^T Q| = {tilt:.3g}"
    if found.residual > tilt:
        reason = f"{reason}; {found.reason}"
    raise NotAGradientFlow(f"L2Attention is not a gradient flow: {reason}", max(tilt, found.residual))


def _affine_only(
    blocks: list[tuple[Tensor, Tensor]], attention: Attention, tol: float | None
) -> GradientStructure:
    """W = D H with H symmetric: W has real eigenvalues and a basis of eigenvectors P, D = P P^T."""
    if not blocks:
        dim = attention.dim or 1
        D = torch.eye(dim, dtype=torch.float64)
        energy: Energy = QuadraticPotential(to_kind(torch.zeros_like(D), attention.kind))
        return GradientStructure(energy, Wasserstein(), 0, to_kind(D, attention.kind), 0.0)
    W = torch.stack([b[0] for b in blocks]).sum(0)
    D = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
    size = torch.linalg.matrix_norm(W).clamp_min(torch.finfo(W.dtype).tiny)
    bound = torch.finfo(W.dtype).eps ** 0.5 if tol is None else tol
    residual = float(torch.linalg.matrix_norm(W - W.mT) / size)
    if residual > bound:
        w, P = torch.linalg.eig(W)
        if float(w.imag.abs().max()) <= bound * float(w.abs().max()):
            D = symmetrise(P.real @ P.real.mT)
            half = W @ D
            spread = torch.linalg.eigvalsh(D)
            if float(spread[0]) > bound * float(spread[-1]):
                residual = float(torch.linalg.matrix_norm(half - half.mT) / torch.linalg.matrix_norm(half))
    if residual > bound:
        raise NotAGradientFlow(
            f"W of the affine block is not D H with symmetric factors: |W - W^T| / |W| = {residual:.3g}",
            residual,
        )
    energy, _ = _potential(blocks, D, attention.kind)
    return GradientStructure(
        energy, Wasserstein(p=2, D=to_kind(D, attention.kind)), 0, to_kind(D, attention.kind), residual
    )


def _potential(blocks: list[tuple[Tensor, Tensor]], D: Tensor, kind: Kind) -> tuple[Energy, float]:
    """-E[x^T H x / 2 + h^T x] with D H = W, D h = c, and the asymmetry of H."""
    W = torch.stack([b[0] for b in blocks]).sum(0).to(D)
    c = torch.stack([b[1] for b in blocks]).sum(0).to(D)
    H = torch.linalg.solve(D, W)
    h = torch.linalg.solve(D, c.unsqueeze(-1)).squeeze(-1)
    size = torch.linalg.matrix_norm(H).clamp_min(torch.finfo(H.dtype).tiny)
    misfit = float(torch.linalg.matrix_norm(H - H.mT) / size)
    return QuadraticPotential(to_kind(-H, kind), to_kind(-h, kind)), misfit


def _sum(energies: list[Energy]) -> Energy:
    total = energies[0]
    for e in energies[1:]:
        total = total + e
    return total
