"""The Transformer PDE on particles and on Gaussians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ..arrays import ArrayLike, broadcast_batch, common_kind, describe
from ..attention import Attention, Schedule
from ..energies import Energy
from ..errors import InvalidInput, NotGaussianPreserving
from ..measures import Gaussian, Measure, as_measure
from ._drive import drive
from ._options import Options
from ._system import System, expanded, of_kind
from .trajectory import Trajectory, named

__all__ = ["solve"]


def solve(
    attention: Attention,
    measure: Measure,
    t_end: float,
    rtol: float = 1e-8,
    atol: float = 1e-10,
    save_at: ArrayLike | None = None,
    max_steps: int = 100_000,
    stop_when_converged: bool = False,
    *,
    converged_tol: float = 1e-8,
    energy: Energy | Mapping[str, Energy] | None = None,
    method: Literal["explicit", "auto"] = "explicit",
    progress: bool | Callable[[float], None] = False,
) -> Trajectory:
    r"""Flow of a measure by an attention: d/dt mu + div(mu Gamma_mu) = 0.

    Particles follow dx_i/dt = Gamma_mu(x_i). A Gaussian N(m, L L^T) follows its closure dm/dt = b,
    dL/dt = M L, exactly of the rank of L. Batches are one call: every member has its own adaptive step
    (Tsitouras 5(4)) and its own status; parameters may have batch dimensions as well.

    Parameters
    ----------
    attention : Attention
        A `Schedule` is integrated exactly up to each of its jumps; with a callable one all members of a
        batch share their steps.
    measure : Gaussian, Particles, PositionedParticles, or an array (..., n, d)
    t_end : float > 0
    rtol, atol : float
        Local error of a step <= rtol |y| + atol * (present size of the mean, factor or cloud), rms over the
        member. float32: not below 4e-6 and 4e-9.
    save_at : array (T,), optional
        Increasing times in [0, t_end]; default 65 equally spaced ones. The steps land on them exactly.
    max_steps : int
        Steps of a member at most; it then has status "step limit".
    stop_when_converged : bool
        Stop a member once |dS/dt| <= converged_tol |S0| and |dm/dt| <= converged_tol (|m0| + |S0|^{1/2}),
        per unit of time (clouds: rms speed against the rms distance to the centroid at the start).
    energy : Energy, or dict of them, optional
        Recorded at the save times in `.energies` (one Energy goes by the name "energy").
    method : "explicit" or "auto"
        "auto", for Gaussians: members that 1,000 explicit steps do not carry to t_end are stiff and go on with
        SciPy's LSODA, one by one (at most max_steps evaluations between two save times; their states carry no
        gradients).
    progress : bool or callable
        True shows a bar; a callable gets fractions of the time in [0, 1].

    Returns
    -------
    Trajectory

    Raises
    ------
    NotGaussianPreserving
        A Gaussian was given and the kind has no closure.
    InvalidInput
        Dimensions that do not match, times out of order, tolerances <= 0.

    Notes
    -----
    Blow-up. Steps are even in the rescaled time d tau = (1 + rho) dt, rho = <y, dy/dt> / |y|^2 the relative
    growth rate (of the mean or the factor, whichever is larger), in which a blow-up lies at infinity. A flow
    has blown up when rho t > 1e9 while 1/rho falls linearly; exponential growth leaves the floating range at
    rho t < 700, with 1/rho constant. `blow_up_time` is the zero of 1/rho, computed once more at 32 times
    tighter tolerances; `blow_up_error` is the distance between the two numbers plus the extrapolated time:
    about 31 times the error of the better one for a method whose error is proportional to the tolerance.
    A blow-up beyond t_end is not looked for: such a flow is "completed".

    References
    ----------
    Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322; Tsitouras 2011; Lienen, Günnemann, *torchode*, 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from ot_transformers import Gaussian, SoftmaxAttention
    >>> run = solve(SoftmaxAttention(A=1.0, V=1.0), Gaussian([0.0], [[0.5]]), t_end=2.0)
    >>> run.status, round(run.blow_up_time, 6)  # t* = 1 / (2 v a S0)
    ('blew up', 1.0)
    """
    if not isinstance(attention, Attention):
        raise InvalidInput(f"attention must be an Attention, got {describe(attention)}")
    mu = as_measure(measure)
    attention._check(mu, "measure")
    opts = Options(
        t_end, rtol, atol, save_at, max_steps, stop_when_converged, converged_tol, progress, method
    )
    if isinstance(mu, Gaussian) and not attention.preserves_gaussians:
        raise NotGaussianPreserving(
            f"{type(attention).__name__} does not keep Gaussian laws Gaussian: flow measure.sample(n)"
        )
    if opts.method == "auto" and not isinstance(mu, Gaussian):
        raise InvalidInput("method 'auto' is for Gaussians, got particles: use 'explicit'")
    if opts.method == "auto" and isinstance(attention, Schedule) and attention.is_callable:
        raise InvalidInput("method 'auto' needs parameters constant between jumps, got a callable Schedule")
    mu = expanded(of_kind(mu, common_kind(mu, attention)), attention.batch_shape, type(attention).__name__)
    jumps = attention.jumps if isinstance(attention, Schedule) else ()
    if isinstance(attention, Schedule):
        # A schedule that does not cover [0, t_end] says so now; a callable one may jump to more batch dimensions.
        for t in (0.0, *(j for j in jumps if 0.0 < j < opts.t_end), opts.t_end):
            mu = expanded(mu, attention.at(t).batch_shape, f"f({t:g})")
    return drive(_systems(attention), mu, opts, jumps, named(energy))


def _systems(attention: Attention) -> Callable[[Measure, float, float], System]:
    def system_at(measure: Measure, start: float, end: float) -> System:
        if isinstance(attention, Schedule):
            if attention.is_callable:
                return _TimeDependent(attention, measure, start)
            layer = attention.at(0.5 * (start + end))
        else:
            layer = attention
        return _system(layer, measure)

    return system_at


def _system(attention: Attention, measure: Measure) -> System:
    if isinstance(measure, Gaussian):

        def member(i: int) -> System:
            shape = system.batch_shape
            index = tuple(int(k) for k in np.unravel_index(i, shape)) if shape else ()
            m, L = measure.mean_t.detach(), measure.factor_t.detach()
            one = Gaussian.unchecked(
                m.expand(*shape, *m.shape[-1:])[index],
                factor=L.expand(*shape, *L.shape[-2:])[index],
                kind=measure.kind,
            )
            return System(one, gaussian=attention.member(index, shape).raw_affine)

        system = System(measure, gaussian=attention.raw_affine, member=member)
        return system
    return System(measure, particles=attention.evaluator(measure))


class _TimeDependent(System):
    """Parameters that vary continuously: the members of a batch are one state and share their time."""

    def __init__(self, schedule: Schedule, measure: Measure, start: float) -> None:
        first = _system(schedule.at(start), measure)
        super().__init__(measure, first._gaussian, first._particles)
        self.schedule = schedule
        self.y0 = self.y0.reshape(1, -1)

    def field(self, t: Any, y: Any) -> Any:
        """dy/dt with the parameters of the time of the stage."""
        now = float(t[0])
        attention = self.schedule.at(now)
        if broadcast_batch([attention.batch_shape, self.batch_shape], ["f", "measure"]) != self.batch_shape:
            raise InvalidInput(
                f"f brings batch dimensions {attention.batch_shape} at t = {now:g} to a measure of batch "
                f"{self.batch_shape}: have them at time 0, or name the time among the jumps"
            )
        layer = _system(attention, self.measure(y))
        return layer.field(t, y.reshape(layer.y0.shape)).reshape(y.shape)

    def at_rest(self, tol: float) -> Any:
        """Convergence means little while parameters move: never."""
        return None
