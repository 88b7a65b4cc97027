"""A-priori bounds of an attention on a ball: the constants of well-posedness and stability."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionBounds"]


@dataclass(frozen=True)
class AttentionBounds:
    """Bounds that hold for every mu, nu supported in the ball of radius R and every x in it.

    Attributes
    ----------
    speed : float
        sup |Gamma_mu(x)|.
    lipschitz_x : float
        Lipschitz constant of x -> Gamma_mu(x).
    lipschitz_measure : float
        L with |Gamma_mu(x) - Gamma_nu(x)| <= L W_1(mu, nu).
    """

    speed: float
    lipschitz_x: float
    lipschitz_measure: float

    def scaled(self, factor: float) -> AttentionBounds:
        """Bounds of W Gamma for a matrix W of spectral norm `factor`."""
        return AttentionBounds(
            factor * self.speed, factor * self.lipschitz_x, factor * self.lipschitz_measure
        )

    def __add__(self, other: AttentionBounds) -> AttentionBounds:
        """Bounds of a sum of attentions."""
        return AttentionBounds(
            self.speed + other.speed,
            self.lipschitz_x + other.lipschitz_x,
            self.lipschitz_measure + other.lipschitz_measure,
        )
