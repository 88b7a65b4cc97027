"""E_A against reference values, quadrature, plain sums and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_transformers import Gaussian, InteractionEnergy, Particles
from ot_transformers.energies import Energy
from ot_transformers.numerics import tilted

RNG = np.random.default_rng(0)
A3 = np.array([[0.3, -0.5, 0.1], [0.4, 0.2, -0.3], [-0.1, 0.25, -0.4]])


def plain_sum(x: Any, w: Any, A: Any) -> float:
    return 0.5 * float(w @ np.exp(x @ A @ x.T) @ w)


def hermite(n: int) -> tuple[Any, Any]:
    z, w = np.polynomial.hermite_e.hermegauss(n)
    return z, w / w.sum()


def test_reference_value_on_a_gaussian(reference: Any) -> None:
    r = reference["interaction_d3"]
    value = InteractionEnergy(r["A"]).value(Gaussian(r["m"][:, 0], r["S"]))
    assert value == pytest.approx(r["value"], rel=1e-12)


@pytest.mark.parametrize("a", [-0.6, 0.45])
def test_gaussian_of_the_line_against_quadrature(a: float) -> None:
    m, s = 0.3, 0.8
    z, w = hermite(80)
    x = m + math.sqrt(s) * z
    assert InteractionEnergy(a).value(Gaussian(m, s)) == pytest.approx(
        plain_sum(x[:, None], w, np.array([[a]])), rel=1e-12
    )


def test_singular_covariance_and_non_symmetric_interaction_against_quadrature() -> None:
    m, direction = np.array([0.2, -0.1, 0.4]), np.array([0.5, -0.8, 0.3])
    z, w = hermite(80)
    expected = plain_sum(m + z[:, None] * direction, w, A3)
    value = InteractionEnergy(A3).value(Gaussian(m, np.outer(direction, direction)))
    assert value == pytest.approx(expected, rel=1e-12)
    assert InteractionEnergy(A3).value(Gaussian(m, np.zeros((3, 3)))) == pytest.approx(
        0.5 * math.exp(m @ A3 @ m), rel=1e-14
    )


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_domain_on_the_line(sign: float) -> None:
    # Centred: E = (1 - a^2 s^2)^(-1/2) / 2 for |a| s < 1, +inf beyond, for either sign of a.
    energy = InteractionEnergy(sign)
    for s in (0.1, 0.9, 1 - 1e-9):
        assert energy.value(Gaussian(0.0, s)) == pytest.approx(0.5 / math.sqrt((1 - s) * (1 + s)), rel=1e-7)
    assert energy.value(Gaussian(0.0, 1.0)) == math.inf
    assert energy.value(Gaussian(0.5, 1 + 1e-9)) == math.inf


def test_no_nan_outside_the_domain_in_values_and_gradients() -> None:
    scales = torch.tensor([0.5, 1.5, 4.0], dtype=torch.float64)
    cov = (scales[:, None, None] * torch.eye(3, dtype=torch.float64)).requires_grad_()
    mean = torch.full((3, 3), 0.3, dtype=torch.float64, requires_grad=True)
    energy = InteractionEnergy(torch.eye(3, dtype=torch.float64))
    value = energy.raw_gaussian(mean, cov)
    assert torch.isfinite(value).tolist() == [True, False, False]
    assert not torch.isnan(value).any()
    gradients = (*torch.autograd.grad(value.sum(), (mean, cov)), *energy.raw_gaussian_gradient(mean, cov))
    for g in gradients:
        assert torch.isfinite(g).all()
        assert (g[1:] == 0).all()
        assert (g[0] != 0).any()


def test_gaussian_gradient_is_the_derivative_also_at_singular_covariances() -> None:
    energy = InteractionEnergy(A3)
    mean = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64)
    L = torch.from_numpy(RNG.normal(size=(2, 3, 2)) * 0.4)
    cov = L @ L.mT + torch.tensor([0.0, 0.3], dtype=torch.float64)[:, None, None] * torch.eye(3)
    closed = energy.raw_gaussian_gradient(mean.expand(2, 3), cov)
    automatic = Energy.raw_gaussian_gradient(energy, mean.expand(2, 3), cov)
    for a, b in zip(closed, automatic, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    # A PSD perturbation, by a one-sided difference of second order: also where S is singular.
    X = torch.eye(3, dtype=torch.float64)
    h = 1e-4
    f = [energy.raw_gaussian(mean, cov[0] + k * h * X) for k in range(3)]
    slope = (-3 * f[0] + 4 * f[1] - f[2]) / (2 * h)
    torch.testing.assert_close((closed[1][0] * X).sum(), slope, rtol=1e-5, atol=0)


@pytest.mark.parametrize("block", [1 << 21, 50], ids=["dense", "streaming"])
def test_weighted_batched_particles(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilted, "_DENSE", block)
    x = RNG.normal(size=(3, 17, 3))
    w = RNG.dirichlet(np.ones(17), size=3)
    energy = InteractionEnergy(A3)
    value = energy.value(Particles(x, w))
    np.testing.assert_allclose(value, [plain_sum(a, b, A3) for a, b in zip(x, w, strict=True)], rtol=1e-13)
    field = energy.wasserstein_gradient(Particles(x, w))
    # The first variation averages A and A^T.
    for a, b, f in zip(x, w, field, strict=True):
        kernel = np.exp(a @ A3 @ a.T)
        expected = 0.5 * (kernel @ (b[:, None] * a) @ A3.T + kernel.T @ (b[:, None] * a) @ A3)
        np.testing.assert_allclose(f, expected, rtol=1e-11, atol=1e-13)
    automatic = Energy.raw_particles_gradient(energy, torch.from_numpy(x), torch.from_numpy(w))
    np.testing.assert_allclose(field, automatic, rtol=1e-11, atol=1e-13)
    one = energy.value(Particles(x[1], w[1]))
    assert one == pytest.approx(value[1], rel=1e-15)


def test_interaction_matrices_in_a_batch() -> None:
    A = np.stack([A3, -A3, 0.5 * A3])
    x = RNG.normal(size=(3, 6, 3))
    w = np.full(6, 1 / 6)
    np.testing.assert_allclose(
        InteractionEnergy(A).value(Particles(x)),
        [plain_sum(p, w, B) for p, B in zip(x, A, strict=True)],
        rtol=1e-13,
    )


def test_log_value_does_not_overflow_and_gradients_are_not_nan() -> None:
    x = torch.tensor([[30.0, 0.0], [0.0, 30.0]], dtype=torch.float64, requires_grad=True)
    energy = InteractionEnergy(torch.eye(2, dtype=torch.float64))
    mu = Particles(x)
    # E = 1/2 (1/4) (2 e^900 + 2 e^0).
    assert float(energy.log_value(mu).detach()) == pytest.approx(900 - math.log(4), rel=1e-15)
    assert float(energy.value(mu).detach()) == math.inf
    (g,) = torch.autograd.grad(energy.value(mu), x)
    assert torch.isfinite(g).all()
    assert not torch.isnan(energy.wasserstein_gradient(mu)).any()
    (g,) = torch.autograd.grad(energy.log_value(mu), x)
    # Logarithms of size 900 are known to 900 ulp.
    torch.testing.assert_close(g, x.detach(), rtol=900 * 2.3e-16, atol=0)


def test_fault_empirical_sums_that_ignore_weights() -> None:
    x = RNG.normal(size=(2, 3))
    doubled = Particles(np.concatenate([x, x[:1]]))
    weighted = Particles(x, [2 / 3, 1 / 3])
    energy = InteractionEnergy(A3)
    assert energy.value(doubled) == pytest.approx(energy.value(weighted), rel=1e-14)
    with_absent = Particles(np.concatenate([x, [[40.0, 40.0, -40.0]]]), [2 / 3, 1 / 3, 0.0])
    assert energy.value(with_absent) == pytest.approx(energy.value(weighted), rel=1e-14)


def test_fault_callers_array_changed_in_place() -> None:
    x, w, A = RNG.normal(size=(5, 3)), RNG.dirichlet(np.ones(5)), A3.copy()
    kept = x.copy(), w.copy(), A.copy()
    energy = InteractionEnergy(A)
    energy.value(Particles(x, w))
    energy.wasserstein_gradient(Particles(x, w))
    for now, before in zip((x, w, A), kept, strict=True):
        np.testing.assert_array_equal(now, before)
    A[:] = 0.0
    np.testing.assert_array_equal(energy.A, A3)


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_rotation_and_permutation_invariance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(6, 3)), rng.dirichlet(np.ones(6))
    A = rng.normal(size=(3, 3)) * 0.3
    R, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    order = rng.permutation(6)
    value = InteractionEnergy(A).value(Particles(x, w))
    turned = InteractionEnergy(R @ A @ R.T).value(Particles(x[order] @ R.T, w[order]))
    assert turned == pytest.approx(value, rel=1e-11)
    tensor = InteractionEnergy(torch.from_numpy(A)).value(Particles(torch.from_numpy(x), torch.from_numpy(w)))
    assert isinstance(tensor, torch.Tensor)
    assert float(tensor) == pytest.approx(value, rel=1e-15)


def test_float32_keeps_its_dtype_and_seven_digits() -> None:
    x = RNG.normal(size=(9, 3))
    value = InteractionEnergy(A3).value(Particles(x.astype(np.float32)))
    assert value.dtype == np.float32
    assert value == pytest.approx(plain_sum(x, np.full(9, 1 / 9), A3), rel=1e-5)


def test_value_and_gradient_at_once_are_those_apart() -> None:
    x = torch.from_numpy(RNG.normal(size=(2, 7, 3)))
    w = torch.from_numpy(RNG.dirichlet(np.ones(7), size=2))
    for energy in (
        InteractionEnergy(A3),
        InteractionEnergy(A3 + A3.T),
        -0.5 * InteractionEnergy(A3) + 2.0 * InteractionEnergy(A3.T),
    ):
        value, gradient = energy.raw_particles_value_gradient(x, w)
        torch.testing.assert_close(value, energy.raw_particles(x, w), rtol=1e-14, atol=0)
        torch.testing.assert_close(
            gradient, Energy.raw_particles_gradient(energy, x, w), rtol=1e-11, atol=1e-13
        )
