"""The twisted metric on clouds: identities of gradient flows, tangents, steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ot_transformers.attention import SoftmaxAttention
from ot_transformers.energies import InteractionEnergy
from ot_transformers.errors import NotAGradientFlow
from ot_transformers.measures import Particles
from ot_transformers.metrics import TwistedWasserstein
from ot_transformers.numerics.twisted import geodesic_acceleration, kernel_at, log_speed

from .twisted_settings import cloud, setting


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_particle_gradient_flow_of_the_interaction_energy_is_softmax_attention(seed: int) -> None:
    A, D = setting(seed)
    for sign in (1, -1):
        metric = TwistedWasserstein(A, sign * D @ A)
        assert metric.sign == sign
        np.testing.assert_allclose(metric.D, D, rtol=1e-10)
        p = cloud(seed, 15)
        descent = -metric.raw_particles_steepest(-sign * InteractionEnergy(A), p.x_t, p.weights_t)
        velocity = SoftmaxAttention(A, sign * D @ A).velocity(p)
        np.testing.assert_allclose(descent.numpy(), velocity, rtol=1e-12, atol=1e-13)


def test_energy_decays_at_the_squared_speed() -> None:
    A, D = setting(5)
    metric, energy, p = TwistedWasserstein(A, D=D), InteractionEnergy(A), cloud(5, 10)
    v = torch.from_numpy(np.asarray(SoftmaxAttention(A, D @ A).velocity(p)))
    x = p.x_t.clone().requires_grad_()
    rate = (torch.autograd.grad(energy.raw_particles(x, p.weights_t), x)[0] * v).sum()
    # Softmax with sign + ascends E: dE/dt = +g(v, v).
    assert float(rate) == pytest.approx(float(metric.inner(p, v.numpy(), v.numpy())), rel=1e-12)


def test_riesz_representative() -> None:
    A, D = setting(3)
    metric, p = TwistedWasserstein(A, D=D), cloud(3, 8)
    rng = np.random.default_rng(0)
    g, w = rng.standard_normal((2, 8, 2))
    v = metric.raw_particles_riesz(p.x_t, p.weights_t, torch.from_numpy(g)).numpy()
    assert float(metric.inner(p, v, w)) == pytest.approx(float((p.weights[:, None] * g * w).sum()), rel=1e-12)


def test_acceleration_is_the_euler_lagrange_equation() -> None:
    A, D = (torch.from_numpy(t) for t in setting(7))
    p = cloud(7, 6)
    x, w = p.x_t, p.weights_t
    v = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def lagrangian(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        G = torch.exp(x @ A @ x.T) @ w
        return 0.5 * (w * G * (v @ torch.linalg.inv(D) * v).sum(-1)).sum()

    a = geodesic_acceleration(x, v, A, D, kernel_at(x, w, A))
    momentum = torch.func.grad(lagrangian, argnums=1)
    # d/dt dL/dv along (x', v') = (v, a) equals dL/dx.
    _, change = torch.func.jvp(momentum, (x, v), (v, a))
    torch.testing.assert_close(change, torch.func.grad(lagrangian)(x, v), rtol=1e-10, atol=1e-12)


def test_log_speed_and_its_derivatives() -> None:
    A, D = (torch.from_numpy(t) for t in setting(8))
    Dinv = torch.linalg.inv(D)
    p = cloud(8, 5)
    v = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    x = p.x_t.clone().requires_grad_()
    w = p.weights_t
    dense = torch.log((w * (torch.exp(x @ A @ x.T) @ w) * (v @ Dinv * v).sum(-1)).sum())
    assert float(log_speed(x, v, w, A, Dinv).detach()) == pytest.approx(float(dense.detach()), rel=1e-13)
    torch.autograd.gradcheck(lambda x, v: log_speed(x, v, w, A, Dinv), (x, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kind_and_dtype_come_back(dtype: torch.dtype) -> None:
    metric = TwistedWasserstein(-np.eye(2), D=np.eye(2))
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    p, q = Particles(x), Particles(x + 0.3)
    g = metric.geodesic(p, q)
    assert g.length.dtype == metric.distance(p, q).dtype == g.at(0.3).x.dtype == dtype
    numpy = TwistedWasserstein(-np.eye(2), D=np.eye(2)).distance(
        Particles(x.numpy()), Particles((x + 0.3).numpy())
    )
    assert float(numpy) == float(metric.distance(p, q))
    step = metric.proximal(InteractionEnergy(-np.eye(2)), p, 0.1)
    assert step.converged
    assert step.measure.x.dtype == dtype


def test_inner_is_zero_not_nan_at_rest_where_the_interaction_overflows() -> None:
    metric = TwistedWasserstein(np.eye(2), D=np.eye(2))
    assert float(metric.inner(Particles([[40.0, 0.0]]), np.zeros((1, 2)), np.ones((1, 2)))) == 0.0


def test_exp_log_and_proximal_of_a_batch_are_the_loop() -> None:
    A, D = setting(2)
    metric = TwistedWasserstein(A, D=D, tol=1e-6)
    rng = np.random.default_rng(1)
    x, v = rng.standard_normal((2, 3, 2)), 0.1 * rng.standard_normal((2, 3, 2))
    ends = metric.exp(Particles(x), v)
    step = metric.proximal(InteractionEnergy(A), Particles(x), 0.05)
    logs = metric.log(Particles(x), ends)
    for k in range(2):
        np.testing.assert_array_equal(ends.x[k], metric.exp(Particles(x[k]), v[k]).x)
        np.testing.assert_array_equal(
            step.measure.x[k], metric.proximal(InteractionEnergy(A), Particles(x[k]), 0.05).measure.x
        )
    np.testing.assert_allclose(logs, v, atol=1e-7)


def test_a_bad_warm_start_does_not_raise_the_energy() -> None:
    A, D = setting(3)
    metric, p, energy = TwistedWasserstein(A, D=D), cloud(3, 5), InteractionEnergy(A)
    far = p.moved(p.x_t + 5.0)
    step = metric.proximal(energy, p, 0.1, warm_start=far)
    assert step.converged
    assert step.energy_after < step.energy_before


def test_batch_is_the_loop() -> None:
    A, D = setting(2)
    metric = TwistedWasserstein(A, D=D, tol=1e-6)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3, 4, 2))
    together = metric.distance(Particles(x), Particles(y))
    alone = [float(metric.distance(Particles(a), Particles(b))) for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_no_mobility_says_by_how_much() -> None:
    with pytest.raises(NotAGradientFlow, match="not symmetric") as caught:
        TwistedWasserstein(np.array([[0.0, 1.0], [-1.0, 0.0]]), np.eye(2))
    assert caught.value.residual == pytest.approx(2.0)
    with pytest.raises(NotAGradientFlow, match="positive definite"):
        TwistedWasserstein(np.eye(2), np.diag([1.0, -1.0]))


def test_singular_interaction_with_and_without_a_mobility() -> None:
    A = np.diag([1.0, 0.0])
    assert TwistedWasserstein(A, A).sign == 1
    np.testing.assert_allclose(TwistedWasserstein(A, D=2 * np.eye(2)).D, 2 * np.eye(2))
    with pytest.raises(NotAGradientFlow):
        TwistedWasserstein(A, np.eye(2))  # V does not vanish on ker A


@pytest.mark.parametrize("tau", [0.01, 0.3])
def test_proximal_step_never_increases_the_energy(tau: float) -> None:
    A, D = setting(3)
    metric, p = TwistedWasserstein(A, D=D), cloud(3, 10)
    # -E_A is not bounded below where A has a positive eigenvalue: only short steps have a minimiser near mu.
    energies = [InteractionEnergy(A)] if tau > 0.1 else [InteractionEnergy(A), -InteractionEnergy(A)]
    for energy in energies:
        step = metric.proximal(energy, p, tau)
        assert step.converged
        assert step.energy_after < step.energy_before


def test_proximal_step_tends_to_the_flow_at_order_one() -> None:
    A, D = setting(3)
    metric, p = TwistedWasserstein(-A @ A, D=D), cloud(3, 6)
    energy = InteractionEnergy(-A @ A)
    errors = []
    v = -metric.raw_particles_steepest(energy, p.x_t, p.weights_t).numpy()
    for tau in (0.004, 0.002, 0.001):
        step = metric.proximal(energy, p, tau).measure
        errors.append(np.abs((step.x - p.x) / tau - v).max())
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 1.0, atol=0.15)
