"""What users see: NumPy in, NumPy everywhere; torch in, tensors; and nobody writes to what an object keeps."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ot_transformers as otf
from ot_transformers.attention import Attention
from ot_transformers.convexity import Curve
from ot_transformers.energies import (
    PairInteraction,
    QuadraticInteraction,
    QuadraticPotential,
    SoftplusInteraction,
)
from ot_transformers.metrics import Metric, bures_barycenter_result, bures_inner
from ot_transformers.models import AttentionLayer

Face = Callable[[Any], Any]
FACES: dict[str, Face] = {
    "numpy": lambda a: np.array(a, dtype=float),
    "list": lambda a: np.asarray(a, dtype=float).tolist(),
    "torch": lambda a: torch.tensor(np.asarray(a, dtype=float)),
}
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(2, 4, 2)) * 0.5
A = np.array([[-1.0, 0.2], [0.2, -0.5]])
V, W, D = A.copy(), np.array([[0.3, -0.1], [0.4, 0.2]]), np.diag([1.0, 2.0])
S, T, M, C = np.diag([0.5, 0.3]), np.array([[0.4, 0.1], [0.1, 0.6]]), np.array([0.2, -0.1]), np.ones(2)
WEIGHTS, PLACES, EIGHTH = (
    np.array([0.4, 0.3, 0.2, 0.1]),
    np.array([0.0, 0.3, 0.3, 1.0]),
    np.linspace(-4, 4, 9),
)

MEASURES: dict[str, Callable[[Face], Any]] = {
    "Gaussian": lambda f: otf.Gaussian(f(M), f(S)),
    "Gaussian.from_factor": lambda f: otf.Gaussian.from_factor(f(M), f(T)),
    "Particles": lambda f: otf.Particles(f(X)),
    "Particles-weighted": lambda f: otf.Particles(f(X), f(WEIGHTS)),
    "Particles-batch": lambda f: otf.Particles(f([X, Y]), f(WEIGHTS)),
    "PositionedParticles": lambda f: otf.PositionedParticles(f(X), f(PLACES), f(WEIGHTS)),
    "GridMeasure": lambda f: otf.GridMeasure([f(EIGHTH)], f(np.full(9, 1 / 9))),
    "AffineVelocity": lambda f: otf.SoftmaxAttention(f(A), f(V)).affine(otf.Gaussian(f(M), f(S))),
}
PARAMETERS: dict[str, Callable[[Face], Any]] = {
    "SoftmaxAttention": lambda f: otf.SoftmaxAttention(f(A), f(V)),
    "SoftmaxAttention.from_qkv": lambda f: otf.SoftmaxAttention.from_qkv(f(W), f(T), f(V)),
    "L2Attention": lambda f: otf.L2Attention(f(W), f(T), f(V)),
    "LinearAttention": lambda f: otf.LinearAttention(f(A), f(V)),
    "SinkhornAttention": lambda f: otf.SinkhornAttention(f(A), f(V)),
    "SigmoidAttention": lambda f: otf.SigmoidAttention(f(A), f(V)),
    "UnnormalisedAttention": lambda f: otf.UnnormalisedAttention(f(A), f(V)),
    "AffineBlock": lambda f: otf.AffineBlock(f(W), f(C)),
    "AffineBlock-linear": lambda f: otf.AffineBlock(f(W)),
    "MultiHeadAttention": lambda f: otf.MultiHeadAttention([otf.SoftmaxAttention(f(A), f(V))], [f(W)]),
    "MaskedAttention": lambda f: otf.MaskedAttention(otf.SoftmaxAttention(f(A), f(V))),
    "Schedule": lambda f: otf.Schedule([otf.SoftmaxAttention(f(A), f(V))], [0.0]).at(0.5),
    "batch-member": lambda f: otf.SoftmaxAttention(f([A, W]), f(V)).member((1,), (2,)),
    "InteractionEnergy": lambda f: otf.InteractionEnergy(f(A)),
    "SelfTransportEnergy": lambda f: otf.SelfTransportEnergy(f(A)),
    "KLDivergence": lambda f: otf.KLDivergence(otf.Gaussian(f(M), f(S))),
    "SquaredWasserstein": lambda f: otf.SquaredWasserstein(otf.Particles(f(X))),
    "SinkhornDivergence": lambda f: otf.SinkhornDivergence(otf.Particles(f(X)), 1.0),
    "QuadraticPotential": lambda f: QuadraticPotential(f(S), f(C)),
    "QuadraticPotential-even": lambda f: QuadraticPotential(f(S)),
    "QuadraticInteraction": lambda f: QuadraticInteraction(f(A)),
    "SoftplusInteraction": lambda f: SoftplusInteraction(f(A)),
    "sum": lambda f: 2.0 * otf.SelfTransportEnergy(f(A)) - otf.InteractionEnergy(f(A)),
    "Wasserstein": lambda f: otf.Wasserstein(D=f(D)),
    "BuresWasserstein": lambda f: otf.BuresWasserstein(f(D)),
    "TwistedWasserstein": lambda f: otf.TwistedWasserstein(f(A), D=f(D)),
    "TwistedWasserstein-V": lambda f: otf.TwistedWasserstein(f(A), f(V)),
}


def _cloud(f: Face) -> Any:
    return otf.Particles(f(X))


def _other(f: Face) -> Any:
    return otf.Particles(f(Y))


def _weighted(f: Face) -> Any:
    return otf.Particles(f(Y), f(WEIGHTS))


def _law(f: Face) -> Any:
    return otf.Gaussian(f(M), f(S))


def _laws(f: Face) -> Any:
    return otf.Gaussian(f([M, -M]), f([S, T]))


def _head(f: Face) -> Any:
    return otf.Head(f(W), f(T), f(S), f(A), b_Q=f(C))


def _layer(f: Face) -> Any:
    return AttentionLayer(_cloud(f), (_head(f),), f(X), _other(f), f(C))


def _softmax(f: Face) -> Any:
    return otf.SoftmaxAttention(f(A), f(V))


def _interaction(f: Face) -> Any:
    return otf.InteractionEnergy(f(A))


def _transport(f: Face) -> Any:
    return otf.SelfTransportEnergy(f(A))


def _twisted(f: Face) -> Any:
    return otf.TwistedWasserstein(f(A), f(V))


RESULTS: dict[str, Callable[[Face], Any]] = {
    "sample": lambda f: [_law(f).sample(3, 0), _law(f).ellipse(), _law(f).log_density(f(X)), _law(f).rank()],
    "velocity": lambda f: [_softmax(f).velocity(_cloud(f)), _softmax(f).field(_cloud(f), f(Y))],
    "affine-field": lambda f: _softmax(f).affine(_law(f)).at(f(X), _law(f)),
    "cov-velocity": lambda f: _softmax(f).affine(_law(f)).cov_velocity(_law(f)),
    "bounds": lambda f: _softmax(f).bounds(1.0),
    "value": lambda f: [e.value(m(f)) for e in (_interaction(f), _transport(f)) for m in (_cloud, _law)],
    "log-value": lambda f: _interaction(f).log_value(_cloud(f)),
    "gradient": lambda f: [_interaction(f).wasserstein_gradient(m(f)) for m in (_cloud, _law, _laws)],
    "potential": lambda f: otf.PotentialEnergy(lambda x: x.square().sum(-1)).quadrature_error(_law(f)),
    "distance": lambda f: [otf.Wasserstein().distance(_cloud(f), _weighted(f)), _twisted(f).line_diameter],
    "geodesic-clouds": lambda f: otf.Wasserstein().geodesic(_cloud(f), _weighted(f)),
    "geodesic-matching": lambda f: otf.Wasserstein().geodesic(_cloud(f), _other(f)),
    "geodesic-gaussians": lambda f: otf.Wasserstein(D=f(D)).geodesic(_law(f), _laws(f)),
    "geodesic-at": lambda f: otf.Wasserstein().geodesic(_cloud(f), _other(f)).at(0.5),
    "wasserstein-log": lambda f: otf.Wasserstein().log(_cloud(f), _other(f)),
    "bures-log": lambda f: otf.BuresWasserstein(f(D)).log(_law(f), _laws(f)),
    "bures-exp": lambda f: otf.BuresWasserstein().exp(_law(f), _softmax(f).affine(_law(f))),
    "bures-inner": lambda f: otf.BuresWasserstein().inner(_law(f), *[_softmax(f).affine(_law(f))] * 2),
    "bures-functions": lambda f: [
        otf.bures_distance(f(S), f(T)),
        otf.bures_map(f(S), f(T)),
        otf.bures_log(f(S), f(T)),
        otf.bures_exp(f(S), f(T)),
        otf.bures_geodesic(f(S), f(T), 0.5),
        otf.bures_transport(f(S), f(T), f(S)),
        otf.bures_barycenter(f([S, T])),
        bures_inner(f(S), f(T), f(T)),
    ],
    "barycenter": lambda f: [bures_barycenter_result(f([S, T])), otf.BuresWasserstein().barycenter(_laws(f))],
    "coupling": lambda f: otf.sinkhorn_coupling(_law(f), f(A)),
    "conditional": lambda f: otf.ConditionalWasserstein().distance(
        *[otf.PositionedParticles(f(z), f(PLACES)) for z in (X, Y)]
    ),
    "twisted-clouds": lambda f: _twisted(f).geodesic(_cloud(f), _other(f)),
    "twisted-gaussians": lambda f: _twisted(f).geodesic(_law(f), otf.Gaussian(f(-M), f(T))),
    "twisted-equal": lambda f: [_twisted(f).geodesic(m(f), m(f)) for m in (_cloud, _law)],
    "twisted-line": lambda f: otf.TwistedWasserstein(f(-1.0), f(-1.0)).geodesic(
        otf.Particles(f([[0.1]])), otf.Particles(f([[0.6]]))
    ),
    "twisted-batch": lambda f: _twisted(f).geodesic(_law(f), _laws(f)),
    "twisted-log": lambda f: _twisted(f).log(_cloud(f), _other(f)),
    "twisted-action": lambda f: _twisted(f).action(f([X, Y])),
    "solve-cloud": lambda f: otf.solve(_softmax(f), _cloud(f), 0.2, save_at=f([0.0, 0.1, 0.2])),
    "solve-gaussians": lambda f: otf.solve(_softmax(f), _laws(f), 0.2, save_at=[0.1, 0.2]),
    "gradient-flow": lambda f: otf.gradient_flow(_interaction(f), _cloud(f), 0.1, save_at=[0.1]),
    "structure": lambda f: otf.gradient_structure(_softmax(f)),
    "structure-affine": lambda f: otf.gradient_structure(otf.AffineBlock(f(S), f(C))),
    "jko-cloud": lambda f: otf.jko(_interaction(f), _cloud(f), 0.1, 2),
    "jko-gaussians": lambda f: otf.jko_step(_transport(f), _laws(f), 0.1),
    "jko-explicit": lambda f: otf.jko_step(_transport(f), _laws(f), 0.1, variant="explicit"),
    "jko-linearised": lambda f: otf.jko_step(_transport(f), _laws(f), 0.1, variant="linearised"),
    "jko-twisted": lambda f: otf.jko_step(_interaction(f), otf.Particles(f([X, Y])), 0.01, _twisted(f)),
    "grid-jko": lambda f: otf.grid_jko(
        QuadraticPotential(f([[1.0]])), MEASURES["GridMeasure"](f), 0.1, 2, eps=0.5
    ),
    "curves": lambda f: [
        otf.DisplacementCurve(_cloud(f), _weighted(f)),
        otf.MixtureCurve(_cloud(f), _other(f)),
        otf.GeneralisedGeodesic(_cloud(f), _other(f), _cloud(f)),
        otf.BuresGeodesic(_law(f), otf.Gaussian(f(M), f(T)), D=f(D)),
        otf.TwistedGeodesic(_twisted(f), _cloud(f), _other(f)),
    ],
    "probe": lambda f: otf.probe_convexity(_interaction(f), otf.DisplacementCurve(_cloud(f), _other(f))),
    "hessian": lambda f: otf.riemannian_hessian(_interaction(f), _twisted(f), _cloud(f)),
    "hessian-tangents": lambda f: [
        otf.riemannian_hessian(_interaction(f), otf.Wasserstein(), _cloud(f)).min_eigenpair(),
        otf.riemannian_hessian(_interaction(f), otf.BuresWasserstein(), _law(f)).min_eigenpair(),
        otf.riemannian_hessian(_interaction(f), otf.Wasserstein(), _cloud(f)).matvec(f(Y)),
        otf.riemannian_hessian(_interaction(f), otf.Wasserstein(), _cloud(f)).norm_squared(f(Y)),
    ],
    "witness": lambda f: otf.find_nonconvexity(
        _interaction(f), otf.Wasserstein(), dim=2, n=2, n_starts=1, max_iter=5
    ),
    "classify": lambda f: otf.classify(_softmax(f), otf.solve(_softmax(f), _laws(f), 1.0)),
    "clustering": lambda f: otf.clustering_report(_cloud(f)),
    "gaussianity": lambda f: otf.gaussianity(_cloud(f), n_directions=4, n_null=4),
    "stability": lambda f: otf.stability_experiment(_softmax(f), _cloud(f), _other(f), 0.1, n_times=2),
    "mean-field": lambda f: otf.mean_field_experiment(_softmax(f), _law(f), 0.1, ns=(8, 16), n_repeats=2),
    "numerical-rank": lambda f: otf.numerical_rank(f(S)),
    "layer": lambda f: [_layer(f).attention(), _layer(f).homogeneous_tokens(), _layer(f)],
    "head": lambda f: [_head(f), _head(f).double(), _head(f).homogeneous(), _head(f).A(), _head(f).V],
}
ALL = MEASURES | PARAMETERS | RESULTS

_PLAIN = {
    *("times", "last_times", "blow_up_time", "blow_up_error", "energies", "energy_rates", "stats", "valid"),
    *("ns", "errors", "rms", "distances", "ratios", "bounds", "masses", "trace", "exponents", "growth_rate"),
    *("matching", "lengths"),
}
"""Records about a result, NumPy by definition whatever came in."""
_NEEDS_ARRAYS = {"head", "layer"}
_SKIP = {"resume", "raw_chart"}


def leaves(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Arrays and tensors that the public attributes of a value lead to, with the way to each."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        yield path, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from leaves(v, f"{path}[{k!r}]", seen)
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from leaves(v, f"{path}[{i}]", seen)
    elif callable(value) and not isinstance(value, type) and path.endswith("]"):  # in a dict of details
        yield from leaves(value(), f"{path}()", seen)
    elif type(value).__module__.startswith("ot_transformers") and id(value) not in seen:
        seen.add(id(value))
        names = {n for n in dir(value) if not n.startswith(("_", "raw_")) and not n.endswith("_t")} - _SKIP
        for name in sorted(names):
            inner = getattr(value, name)
            if not callable(inner) or dataclasses.is_dataclass(inner):
                yield from leaves(inner, f"{path}.{name}", seen)


def _made(name: str, face: str) -> Any:
    if face == "list" and name in _NEEDS_ARRAYS:
        pytest.skip("heads are records of arrays: lists are an error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A read-only view must not reach torch.from_numpy, which warns once and shares it.
        warnings.filterwarnings("error", message=".*not writable.*")
        return ALL[name](FACES[face])


@pytest.mark.parametrize("face", ["numpy", "list"])
@pytest.mark.parametrize("name", ALL)
def test_numpy_users_never_see_torch(name: str, face: str) -> None:
    found = dict(leaves(_made(name, face)))
    assert [path for path, a in found.items() if isinstance(a, torch.Tensor)] == []


@pytest.mark.parametrize("name", ALL)
def test_torch_users_get_tensors(name: str) -> None:
    wrong = [
        path
        for path, a in leaves(_made(name, "torch"))
        if not isinstance(a, torch.Tensor)
        and a.dtype.kind == "f"
        and not _PLAIN & set(path.replace("[", ".").split("."))
    ]
    assert wrong == []


def test_every_public_class_of_arrays_is_walked() -> None:
    kinds = (Attention, otf.Energy, Metric, Curve, otf.Gaussian, otf.Particles, otf.GridMeasure)
    public = {getattr(otf, name) for name in otf.__all__}
    public = {c for c in public if isinstance(c, type) and issubclass(c, kinds)} - {otf.Energy, Attention}
    text = {type(x) for name in ALL for x in _objects(_made(name, "numpy"))}
    plain = {
        otf.GaussianFunctional,
        otf.PotentialEnergy,
        otf.Entropy,
        otf.ConditionalWasserstein,
        otf.Schedule,
    }
    assert public - text - plain == set()
    assert not issubclass(PairInteraction, tuple(plain))


def _objects(value: Any) -> list[Any]:
    return [x for item in value for x in _objects(item)] if isinstance(value, list) else [value]


def test_trajectory_states_are_read_only(tmp_path: Any) -> None:
    run = otf.solve(_softmax(np.array), _cloud(np.array), 0.2, save_at=[0.1, 0.2])
    for state in [
        *run.states,
        run.at(0.15),
        run.at(0.05),
        otf.Trajectory.load(run.save(tmp_path / "a.npz")).at(0.1),
    ]:
        with pytest.raises(ValueError, match="read-only"):
            state.x[0, 0] = np.nan
        assert np.isfinite(state.x).all()


@pytest.mark.parametrize("name", MEASURES | PARAMETERS)
def test_nobody_writes_through_a_view(name: str) -> None:
    """Known fault: P.x[0, 0] = nan changed the measure."""
    found = dict(leaves(_made(name, "numpy")))
    assert found
    assert [path for path, a in found.items() if a.ndim and a.flags.writeable] == []


@pytest.mark.parametrize("face", ["numpy", "torch"])
@pytest.mark.parametrize("name", MEASURES | PARAMETERS)
def test_an_array_changed_by_its_owner_does_not_change_the_object(name: str, face: str) -> None:
    given: list[Any] = []

    def remembered(a: Any) -> Any:
        given.append(FACES[face](a))
        return given[-1]

    made = ALL[name](remembered)
    before = {path: np.array(a) for path, a in leaves(made)}
    for a in given:
        a[...] = 7.0
    for path, a in leaves(made):
        np.testing.assert_array_equal(np.asarray(a), before[path], err_msg=path)


def test_the_copy_at_the_door_keeps_the_history() -> None:
    x, S_t, B = (torch.tensor(a, requires_grad=True) for a in (X, S, A))
    w = torch.tensor(WEIGHTS, requires_grad=True)
    value = (
        otf.Particles(x, w).mean.sum()
        + otf.Gaussian(torch.tensor(M), S_t).cov.sum()
        + otf.AffineBlock(B).W.sum()
    )
    gx, gw, gS, gB = torch.autograd.grad(value, (x, w, S_t, B))
    np.testing.assert_allclose(gx, WEIGHTS[:, None] * np.ones((4, 2)), rtol=1e-15)
    # Weights are normalised: a derivative along (1, ..., 1) is 0.
    np.testing.assert_allclose(gw, X.sum(1) - WEIGHTS @ X.sum(1), rtol=1e-13)
    np.testing.assert_array_equal(gS, np.ones((2, 2)))
    np.testing.assert_array_equal(gB, np.ones((2, 2)))


def test_parameters_cannot_be_assigned() -> None:
    with pytest.raises(AttributeError, match=r"SoftmaxAttention\.A is read-only"):
        _softmax(np.array).A = np.eye(2)
    assert otf.SoftmaxAttention.A.__doc__ == "Score matrix, (..., d, d)."
