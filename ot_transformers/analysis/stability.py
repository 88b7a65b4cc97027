"""Stability of the Transformer PDE in its initial law: an explicit Gronwall constant, and the measured ratio."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from ..arrays import as_scalar, check_count, check_positive, describe
from ..attention import Attention, Schedule
from ..errors import InvalidInput, NotConverged
from ..flows import solve
from ..measures import Particles, as_particles, check_same_dim
from ..metrics import Wasserstein

__all__ = ["StabilityConstant", "StabilityReport", "stability_constant", "stability_experiment"]


class StabilityConstant(float):
    """The number C(t, R0), a float (inf where it overflows), with its logarithm and the radius reached.

    Attributes
    ----------
    log_value : float
        log C(t, R0), finite where C itself overflows.
    radius : float
        R(t), the radius of a ball that holds the support at time t.
    """

    log_value: float
    radius: float

    def __new__(cls, log_value: float, radius: float) -> StabilityConstant:
        """Build from log C and R(t)."""
        self = super().__new__(cls, math.exp(log_value) if log_value < 709.0 else math.inf)
        self.log_value, self.radius = log_value, radius
        return self

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.log_value, self.radius


def stability_constant(attention: Attention | Schedule, t: float, R0: float) -> StabilityConstant:
    r"""Constant C(t, R0) with W_p(mu_t, nu_t) <= C(t, R0) W_p(mu_0, nu_0) for all p >= 1.

    It holds for all mu_0, nu_0 supported in the ball of radius R0. Derivation. Let the attention have, on
    the ball of radius R, speed at most s(R), Lipschitz constant a(R) in x, and
    |Gamma_mu(x) - Gamma_nu(x)| <= b(R) W_1(mu, nu) (`Attention.bounds`). Then the supports stay in the ball
    of radius R(t), R' = s(R), R(0) = R0. Move an optimal pair (X_0, Y_0) of mu_0, nu_0 by the two flows:

        d/dt |X - Y| <= |Gamma_mu(X) - Gamma_mu(Y)| + |Gamma_mu(Y) - Gamma_nu(Y)|
                     <= a |X - Y| + b W_1(mu_t, nu_t),

    so that the L^p norm of |X - Y|, which bounds W_p >= W_1 from above, satisfies
    d/dt |X - Y|_p <= (a + b) |X - Y|_p, and Gronwall's lemma gives

        C(t, R0) = exp( int_0^t (a + b)(R(s)) ds ).

    Bounds of each kind on the ball of radius R, with spectral norms, A = K^T Q and osc the oscillation of
    the score over the ball:

    - softmax: s = |V| R, a = |V||A| R^2 (D Gamma = V Cov(y) A and |Cov(y)| <= R^2),
      b = |V| (1 + 2|A| R^2) e^{2|A| R^2}. For b write Gamma_mu - Gamma_nu at x as
      V int h d(mu - nu), h(y) = (y - c_nu) e^{y^T A x} / Z_mu, c_nu the barycentre under nu:
      h is Lipschitz with constant (1 + |y - c_nu| |A| R) e^{osc}, osc <= 2|A| R^2.
    - L2: the score is 2 (Qx)^T(Ky) - |Ky|^2 up to a function of x: a = 2|V||A| R^2,
      b = |V| (1 + 4 (|A| + |K|^2) R^2) e^{4|A| R^2 + |K|^2 R^2}.
    - sigmoid: a = |V||A| R^2 / 4, b = |V| (sup sigmoid + |A| R^2 / 4).
    - linear: s = |V||A| R^3 (finite radius only for 2|V||A| R0^2 t < 1), a = |V||A| R^2, b = 2|V||A| R^2.
    - unnormalised: the bounds of the linear and softmax kinds with e^{|A| R^2}.
    - multi-head: sum over heads, each scaled by |W_h|. Affine block x -> W x + c: s = |W| R + |c|, a = |W|.

    Parameters
    ----------
    attention : Attention or Schedule
        One set of parameters (no batch).
    t, R0 : float
        Time and radius of the initial supports, both > 0.

    Returns
    -------
    StabilityConstant
        A float >= 1; inf where the radius bound blows up before t or the constant overflows (then
        `.log_value` still tells).

    Raises
    ------
    InvalidInput
        A kind with no explicit constant. Sinkhorn: stability holds (Carlier, Chizat, Laborde 2024,
        *Displacement smoothness of entropic optimal transport*), with a constant that is not explicit.
        Masked: the restriction to s' <= s is stable in the conditional distance, with a constant that
        depends on the mass at position 0 as well.

    References
    ----------
    Castin, Ablin, Carrillo, Peyre, arXiv 2501.18322, section 3; R. Dobrushin, 1979.
    """
    check_positive(t, "t")
    check_positive(R0, "R0")
    if not isinstance(attention, Attention):
        raise InvalidInput(f"attention must be an Attention, got {describe(attention)}")
    jumps = [s for s in (attention.jumps if isinstance(attention, Schedule) else ()) if 0 < s < t]
    radius, log_c = float(R0), 0.0
    for start, end in zip([0.0, *jumps], [*jumps, float(t)], strict=True):
        radius, log_c = _gronwall(attention, start, end, radius, log_c)
        if not math.isfinite(log_c):
            break
    return StabilityConstant(log_c, radius)


def _gronwall(attention: Attention, start: float, end: float, R: float, log_c: float) -> tuple[float, float]:
    """Integrate (log R)' = s(R) / R and (log C)' = (a + b)(R); inf where the radius bound explodes."""

    def rhs(s: float, y: np.ndarray[Any, Any]) -> list[float]:
        # A schedule is evaluated inside its layer, never on the boundary that belongs to the next one.
        inside = min(max(s, start + 1e-12 * (end - start)), end - 1e-12 * (end - start))
        layer = attention.at(inside) if isinstance(attention, Schedule) else attention
        bounds = layer.bounds(float(np.exp(y[0])))
        return [bounds.speed * math.exp(-y[0]), bounds.lipschitz_x + bounds.lipschitz_measure]

    def explodes(s: float, y: np.ndarray[Any, Any]) -> float:
        return float(300.0 - y[0])

    explodes.terminal = True  # type: ignore[attr-defined]
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            first = rhs(start, np.array([math.log(R), log_c]))
            if not all(map(math.isfinite, first)):
                return math.inf, math.inf
            run = solve_ivp(rhs, (start, end), [math.log(R), log_c], rtol=1e-10, atol=1e-12, events=explodes)
    except OverflowError:
        return math.inf, math.inf
    if run.status != 0 or not np.all(np.isfinite(run.y[:, -1])):
        return math.inf, math.inf
    return math.exp(run.y[0, -1]), float(run.y[1, -1])


@dataclass(frozen=True, eq=False)
class StabilityReport:
    """Measured stability of one pair of initial laws.

    Attributes
    ----------
    times : (T,) times
    distances : (T,) W_p(mu_t, nu_t)
    ratios : (T,) W_p(mu_t, nu_t) / W_p(mu_0, nu_0)
    bounds : (T,) C(t, R0); 1 at t = 0
    R0 : radius of the two initial supports
    holds : whether every measured ratio lies below its bound
    """

    times: np.ndarray[Any, Any]
    distances: np.ndarray[Any, Any]
    ratios: np.ndarray[Any, Any]
    bounds: np.ndarray[Any, Any]
    R0: float
    holds: bool


def stability_experiment(
    attention: Attention,
    mu: Particles,
    nu: Particles,
    t_end: float,
    *,
    p: float = 2,
    n_times: int = 9,
    rtol: float = 1e-8,
    atol: float = 1e-10,
) -> StabilityReport:
    """Flow two clouds and compare W_p(mu_t, nu_t) / W_p(mu_0, nu_0) with `stability_constant`.

    Parameters
    ----------
    attention : Attention
    mu, nu : Particles (n, d), (m, d)
        Two different clouds.
    t_end : float
    p : 1 or 2
        Exponent of the Wasserstein distance.
    n_times : int
        Times, 0 and t_end among them, at least 2.

    Raises
    ------
    InvalidInput
        The clouds are equal (no ratio), have batch dimensions, or the kind has no explicit constant.
    """
    a, b = as_particles(mu, "mu"), as_particles(nu, "nu")
    check_same_dim(a, b)
    check_positive(t_end, "t_end")
    exponent = as_scalar(p, "p")
    if exponent not in (1.0, 2.0):
        raise InvalidInput(f"p must be one of 1, 2, got {describe(p)}")
    check_count(n_times, "n_times", 2)
    if a.batch_shape or b.batch_shape:
        raise InvalidInput("mu and nu must be single clouds without batch dimensions")
    # Tokens of weight 0 are not in the support.
    R0 = max(float(c.x_t[c.weights_t > 0].norm(dim=-1).max()) for c in (a, b))
    if R0 == 0:
        raise InvalidInput("mu and nu are the same measure: there is no ratio to measure")
    times = np.linspace(0.0, float(t_end), n_times)
    bounds = np.array([1.0] + [float(stability_constant(attention, t, R0)) for t in times[1:]])
    metric = Wasserstein(p=int(exponent))
    runs = [solve(attention, c, float(t_end), rtol=rtol, atol=atol, save_at=times) for c in (a, b)]
    if any(str(r.status) not in ("completed", "converged") for r in runs):
        warnings.warn(f"a flow ended early: {runs[0].status}, {runs[1].status}", NotConverged, stacklevel=2)
    pairs = zip(runs[0].states, runs[1].states, strict=False)
    distances = np.array([float(metric.distance(s, r)) for s, r in pairs])
    if distances[0] <= 0:
        raise InvalidInput("mu and nu are the same measure: there is no ratio to measure")
    ratios = distances / distances[0]
    k = len(ratios)
    return StabilityReport(
        times[:k], distances, ratios, bounds[:k], R0, bool((ratios <= bounds[:k] * (1 + 1e-9)).all())
    )
