"""Measures as flat states of an ODE: Gaussians through (mean, factor), clouds through their tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..arrays import Kind, broadcast_batch, readable
from ..errors import InvalidInput
from ..measures import Gaussian, Measure, Particles

__all__ = ["GaussianVelocity", "ParticleVelocity", "System", "expanded", "of_kind"]

GaussianVelocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(mean (..., d), factor (..., d, r)) -> (b (..., d), M (..., d, d))."""
ParticleVelocity = Callable[[Tensor, Tensor], Tensor]
"""(x (..., n, d), weights (..., n)) -> (..., n, d)."""


class System:
    """A measure (or batch) and its velocity, as y (B, features) and dy/dt.

    Gaussians evolve through dm/dt = b, dL/dt = M L for S = L L^T: S stays PSD and keeps its rank exactly.
    """

    def __init__(
        self,
        measure: Measure,
        gaussian: GaussianVelocity | None = None,
        particles: ParticleVelocity | None = None,
        member: Callable[[int], System] | None = None,
    ) -> None:
        """`member`, where there is one, gives the system of one member of the batch alone."""
        self.measure0, self.member = measure, member
        self._gaussian, self._particles = gaussian, particles
        if isinstance(measure, Gaussian):
            assert gaussian is not None
            b, M = gaussian(measure.mean_t, measure.factor_t)
            _check_readable(M)
            # Parameters may bring batch dimensions that the measure does not have.
            self.batch_shape = tuple(torch.broadcast_shapes(measure.batch_shape, b.shape[:-1], M.shape[:-2]))
            d, r = measure.factor_t.shape[-2:]
            m, L = (
                measure.mean_t.expand(*self.batch_shape, d),
                measure.factor_t.expand(*self.batch_shape, d, r),
            )
            state = torch.cat([m.unsqueeze(-1), L], -1)
        else:
            assert particles is not None
            v = particles(measure.x_t, measure.weights_t)
            _check_readable(v)
            self.batch_shape = tuple(v.shape[:-2])
            state = measure.x_t.expand(*self.batch_shape, *measure.x_t.shape[-2:])
        self.shape = tuple(state.shape[-2:])
        self.y0 = state.reshape(-1, self.shape[0] * self.shape[1]).contiguous()
        self.weights = None if isinstance(measure, Gaussian) else measure.weights_t

    def blocks(self) -> list[Tensor]:
        """Indices of the features with a growth rate of their own: mean and factor, or all tokens."""
        column = torch.arange(self.y0.shape[-1], device=self.y0.device) % self.shape[1]
        if self._gaussian is None:
            return [torch.arange(self.y0.shape[-1], device=self.y0.device)]
        return [torch.nonzero(column == 0)[:, 0], torch.nonzero(column > 0)[:, 0]]

    def scale(self, y: Tensor) -> Tensor:
        """Root mean square of the current factor or mean, so that a vanishing factor keeps its digits."""
        z = y.reshape(len(y), -1, *self.shape)
        if self._gaussian is None:
            return z.square().mean((-3, -2, -1)).sqrt().unsqueeze(-1).expand(y.shape)
        factor = z[..., 1:].square().mean((-3, -2, -1)).sqrt()
        mean = torch.maximum(z[..., 0].square().mean((-2, -1)).sqrt(), factor)
        sizes = torch.cat([mean.unsqueeze(-1), factor.unsqueeze(-1).expand(-1, self.shape[1] - 1)], -1)
        return sizes.repeat(1, y.shape[-1] // self.shape[1])

    def unpack(self, y: Tensor) -> Tensor:
        """State of batch shape: (..., d, 1 + r) for Gaussians, (..., n, d) for clouds."""
        return y.reshape(*self.batch_shape, *self.shape)

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        """dy/dt (B, features)."""
        if self._gaussian is not None:
            # A stage behind a trial step too long may hold NaN or an infinite covariance, on which eigh and svd
            # raise for the whole batch: NaN is the answer there, and the step is cut.
            sane = torch.isfinite(y.square().sum(-1, keepdim=True))
            z = self.unpack(torch.where(sane, y, self.y0))
            L = z[..., 1:]
            b, M = self._gaussian(z[..., 0], L)
            dz = torch.cat([b.expand(*self.batch_shape, -1).unsqueeze(-1), M @ L], -1)
            return torch.where(sane, dz.reshape(y.shape), torch.nan)
        assert self._particles is not None
        assert self.weights is not None
        return self._particles(self.unpack(y), self.weights).reshape(y.shape)

    def field_of_many(self, y: Tensor) -> Tensor:
        """dy/dt (k, features) at k states of a Gaussian without batch dimensions."""
        assert self._gaussian is not None
        z = y.reshape(-1, *self.shape)
        b, M = self._gaussian(z[..., 0], z[..., 1:])
        return torch.cat([b.unsqueeze(-1), M @ z[..., 1:]], -1).reshape(y.shape)

    def turn(self, y: Tensor, f: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Turn factors L to L W = U diag(s) (and their velocities): the same covariances, graded columns.

        A factor whose columns have all grown along one direction has lost the other directions to rounding;
        in graded columns each direction keeps its own relative precision.
        """
        if self._gaussian is None or self.shape[1] < 3:
            return y, f
        z, dz = (v.reshape(-1, *self.shape)[which] for v in (y, f))
        W = torch.linalg.svd(z[..., 1:], full_matrices=False).Vh.mT
        if W.shape[-1] < W.shape[-2]:
            return y, f  # more columns than dimensions: a square rotation is not at hand
        out = []
        for whole, part in ((y, z), (f, dz)):
            rotated = torch.cat([part[..., :1], part[..., 1:] @ W], -1)
            full = whole.reshape(-1, *self.shape).clone()
            full[which] = rotated
            out.append(full.reshape(y.shape))
        return out[0], out[1]

    def graded(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """A Gaussian without batch dimensions with its factor as U diag(s), and the size of each feature's column.

        The covariance is the same; in graded columns each direction keeps its own relative precision.
        """
        z = y.reshape(self.shape)
        U, s, _ = torch.linalg.svd(z[..., 1:], full_matrices=False)
        graded = torch.cat([z[..., :1], U * s, z.new_zeros(self.shape[0], self.shape[1] - 1 - len(s))], -1)
        return graded.reshape(y.shape), graded.square().mean(0).sqrt().expand(self.shape).reshape(y.shape)

    def velocity(self, t: float) -> Tensor:
        """The velocity of the measure, in the shape of its state."""
        return self.unpack(self.field(self.y0.new_full((len(self.y0),), t, dtype=torch.float64), self.y0))

    def measure(self, y: Tensor) -> Measure:
        """The measure of a state."""
        z = self.unpack(y)
        if isinstance(self.measure0, Gaussian):
            return Gaussian.unchecked(z[..., 0], factor=z[..., 1:], kind=self.measure0.kind)
        first: Particles = self.measure0
        return first.moved(z)

    def at_rest(self, tol: float) -> Callable[[Tensor, Tensor], Tensor]:
        """The test of convergence |dS/dt| <= tol |S0|, |dm/dt| <= tol (|m0| + |S0|^{1/2}), per member.

        For clouds: the rms speed against tol times the rms distance to the centroid at the start.
        """
        z0 = self.unpack(self.y0.detach())
        if self._gaussian is None:
            w = self._w()
            centred = z0 - (w.unsqueeze(-1) * z0).sum(-2, keepdim=True)
            size = (w * centred.square().sum(-1)).sum(-1).sqrt().reshape(-1)

            def clouds(y: Tensor, f: Tensor) -> Tensor:
                speed = (w * self.unpack(f.detach()).square().sum(-1)).sum(-1).sqrt().reshape(-1)
                return speed <= tol * size

            return clouds
        L0 = z0[..., 1:]
        cov = torch.linalg.matrix_norm(L0 @ L0.mT).reshape(-1)
        length = z0[..., 0].norm(dim=-1).reshape(-1) + cov.sqrt()

        def gaussians(y: Tensor, f: Tensor) -> Tensor:
            z, dz = self.unpack(y.detach()), self.unpack(f.detach())
            half = dz[..., 1:] @ z[..., 1:].mT
            still = torch.linalg.matrix_norm(half + half.mT).reshape(-1) <= tol * cov
            return still & (dz[..., 0].norm(dim=-1).reshape(-1) <= tol * length)

        return gaussians

    def _w(self) -> Tensor:
        assert self.weights is not None
        return self.weights


def _check_readable(velocity: Tensor) -> None:
    if not readable(velocity):
        raise InvalidInput(
            "measure or attention is under torch.vmap, where steps cannot adapt: give the batch itself"
        )


def expanded(measure: Measure, batch_shape: tuple[int, ...], name: str) -> Measure:
    """The measure in the joint batch of its own and that of parameters called `name`.

    Parameters may bring batch dimensions at any time of a flow, not only at its start.
    """
    batch = broadcast_batch([measure.batch_shape, batch_shape], ["measure", name])
    if batch == measure.batch_shape:
        return measure
    if isinstance(measure, Gaussian):
        m, L = measure.mean_t, measure.factor_t
        S = None if measure.has_factor else measure.cov_t.expand(*batch, *measure.cov_t.shape[-2:])
        L = L.expand(*batch, *L.shape[-2:])
        return Gaussian.unchecked(m.expand(*batch, measure.dim), S, L, measure.kind)
    return measure.moved(measure.x_t.expand(*batch, measure.n, measure.dim))


def of_kind(measure: Measure, kind: Kind) -> Measure:
    """The measure with answers of a kind."""
    if measure.kind == kind:
        return measure
    if isinstance(measure, Gaussian):
        # Copy through the parts that are there, so that a factor stays a factor.
        cov = None if measure.has_factor else measure.cov_t
        return Gaussian.unchecked(measure.mean_t, cov, measure.factor_t, kind)
    moved: Particles = measure.moved(measure.x_t)
    object.__setattr__(moved, "kind", kind)
    return moved
