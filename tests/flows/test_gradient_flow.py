"""Gradient flows: dissipation, metrics, closed forms; structures of attentions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import ot_transformers as otf

from .closed_forms import random_spd


def problem(sign, d=3, seed=0, rank=None):
    """A symmetric (of a rank), D SPD, V = sign D A."""
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((d, rank or d))
    A = 0.4 * (B * rng.choice([-1.0, 1.0], rank or d)) @ B.T
    D = random_spd(rng, d) + 0.5 * np.eye(d)
    return A, D, sign * D @ A


KINDS = {
    "softmax": otf.SoftmaxAttention,
    "sinkhorn": lambda A, V: otf.SinkhornAttention(A, V, 0.7, tol=1e-12),
    "unnormalised": otf.UnnormalisedAttention,
    "linear": otf.LinearAttention,
    "sigmoid": lambda A, V: otf.SigmoidAttention(A, V, -0.4),
}


@pytest.mark.parametrize("rank", [3, 2, 1])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", list(KINDS))
def test_attention_is_minus_the_gradient_of_its_structure(kind, sign, rank):
    """In velocity: on weighted particles to 1e-10 and on Gaussians to 1e-11; singular A as well."""
    A, D, V = problem(sign, rank=rank)
    attention = KINDS[kind](A, V)
    found = otf.gradient_structure(attention)
    assert found.sign == sign
    assert found.residual <= 1e-12
    np.testing.assert_allclose(sign * found.D @ A, V, atol=1e-12)
    assert np.linalg.eigvalsh(found.D)[0] > 0
    if rank == 3:
        np.testing.assert_allclose(found.D, D, rtol=1e-8)
    rng = np.random.default_rng(3)
    p = otf.Particles(0.5 * rng.standard_normal((9, 3)), rng.dirichlet(np.ones(9)))
    g = found.energy.wasserstein_gradient(p)
    v = -found.metric.raw_particles_riesz(p.x_t, p.weights_t, _tensor(g)).numpy()
    np.testing.assert_allclose(v, attention.velocity(p), rtol=1e-10, atol=1e-11)
    if attention.preserves_gaussians:
        n = otf.Gaussian(0.3 * rng.standard_normal(3), 0.1 * random_spd(rng, 3))
        field = found.energy.wasserstein_gradient(n)
        b, M = found.metric.raw_gaussian_riesz(n.mean_t, n.cov_t, field.b_t, field.M_t / 2)
        exact = attention.affine(n)
        np.testing.assert_allclose(-b.numpy(), exact.b, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(-M.numpy(), exact.M, rtol=1e-9, atol=1e-10)


def _tensor(array):
    import torch

    return torch.as_tensor(np.asarray(array))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["softmax", "sinkhorn", "linear"])
def test_flows_of_attention_and_of_its_energy_are_one_curve(kind, sign):
    A, _, V = problem(sign)
    attention = KINDS[kind](A, V)
    found = otf.gradient_structure(attention)
    rng = np.random.default_rng(4)
    options = {"save_at": [0.0, 0.1, 0.2], "rtol": 1e-10, "atol": 1e-12}
    n = otf.Gaussian(0.3 * rng.standard_normal(3), 0.1 * random_spd(rng, 3))
    a = otf.solve(attention, n, 0.2, energy=found.energy, **options)
    b = otf.gradient_flow(found.energy, n, 0.2, metric=found.metric, **options)
    np.testing.assert_allclose(a.states[-1].cov, b.states[-1].cov, rtol=1e-9)
    np.testing.assert_allclose(a.energy_rates["energy"], b.energy_rates["energy"], rtol=1e-8)
    p = otf.Particles(0.5 * rng.standard_normal((8, 3)))
    a = otf.solve(attention, p, 0.2, **options)
    b = otf.gradient_flow(found.energy, p, 0.2, metric=found.metric, **options)
    np.testing.assert_allclose(a.states[-1].x, b.states[-1].x, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", list(KINDS))
def test_energy_falls_at_the_squared_norm_of_the_gradient(kind):
    """dE/dt = -g(v, v), with the metric's own inner product."""
    A, _, V = problem(-1)
    attention = KINDS[kind](A, V)
    found = otf.gradient_structure(attention)
    rng = np.random.default_rng(5)
    measures = [otf.Particles(0.5 * rng.standard_normal((7, 3)))]
    if attention.preserves_gaussians:
        measures.append(otf.Gaussian(0.2 * np.ones(3), 0.1 * random_spd(rng, 3)))
    for mu in measures:
        run = otf.gradient_flow(found.energy, mu, 0.1, metric=found.metric, save_at=[0.0, 0.1])
        for rate, state in zip(run.energy_rates["energy"], run.states, strict=True):
            v = attention.affine(state) if isinstance(state, otf.Gaussian) else attention.velocity(state)
            assert rate == pytest.approx(-float(found.metric.inner(state, v, v)), rel=1e-8)
            assert rate < 0
        assert np.diff(run.energies["energy"]) < 0


def test_default_metrics_on_a_quadratic_potential():
    """F = E|x|^2 / 2: everything decays like e^-t, whatever the measure."""
    energy = otf.PotentialEnergy(lambda x: 0.5 * x.square().sum(-1))
    g = otf.Gaussian(np.ones(2), np.diag([1.0, 0.0]))
    run = otf.gradient_flow(energy, g, 1.0, save_at=[1.0])
    np.testing.assert_allclose(run.states[-1].cov, np.exp(-2) * np.diag([1.0, 0.0]), rtol=1e-7, atol=1e-15)
    x = np.random.default_rng(6).standard_normal((5, 2))
    run = otf.gradient_flow(energy, otf.Particles(x), 1.0, save_at=[1.0])
    np.testing.assert_allclose(run.states[-1].x, np.exp(-1) * x, rtol=1e-7)


def test_ornstein_uhlenbeck_from_relative_entropy():
    """KL(. | N(0, 1)): variance 1 + (s0 - 1) e^(-2t), mean m0 e^-t."""
    run = otf.gradient_flow(
        otf.KLDivergence(otf.Gaussian([0.0], [[1.0]])),
        otf.Gaussian([1.0], [[3.0]]),
        0.8,
        save_at=[0.8],
        rtol=1e-10,
    )
    assert run.states[-1].cov[0, 0] == pytest.approx(1 + 2 * np.exp(-1.6), rel=1e-9)
    assert run.states[-1].mean[0] == pytest.approx(np.exp(-0.8), rel=1e-9)


def test_heads_with_one_mobility_add_up():
    A1, D, V1 = problem(1)
    A2, _, _ = problem(-1, seed=7)
    W = np.random.default_rng(8).standard_normal((3, 3))
    heads = otf.MultiHeadAttention(
        [otf.SinkhornAttention(A1, V1, tol=1e-12), otf.LinearAttention(A2, -W @ D @ A2), otf.AffineBlock(D)],
        [np.eye(3), np.linalg.inv(W), -np.eye(3)],
    )
    found = otf.gradient_structure(heads)
    np.testing.assert_allclose(found.D, D, rtol=1e-8)
    assert found.sign == 0
    n = otf.Gaussian(np.ones(3), 0.2 * np.eye(3))
    p = otf.Particles(0.5 * np.random.default_rng(9).standard_normal((6, 3)))
    np.testing.assert_allclose(
        -found.energy.wasserstein_gradient(p) @ found.D, heads.velocity(p), rtol=1e-8, atol=1e-9
    )
    np.testing.assert_allclose(
        -found.D @ found.energy.wasserstein_gradient(n).M, heads.affine(n).M, rtol=1e-8
    )


def test_softmax_heads_with_one_score_are_one_head():
    A, D, V = problem(1)
    two = otf.MultiHeadAttention([otf.SoftmaxAttention(A, 0.3 * V), otf.SoftmaxAttention(A, 0.7 * V)])
    found = otf.gradient_structure(two)
    assert isinstance(found.metric, otf.TwistedWasserstein)
    np.testing.assert_allclose(found.D, D, rtol=1e-8)


def test_affine_blocks_with_real_eigenvalues():
    """W = D H, neither symmetric nor normal; x' = W x + c descends a quadratic potential."""
    A, D, _ = problem(1)
    W, c = D @ A, np.array([0.3, -1.0, 0.5])
    found = otf.gradient_structure(otf.AffineBlock(W, c))
    x = np.random.default_rng(10).standard_normal((4, 3))
    v = -found.energy.wasserstein_gradient(otf.Particles(x)) @ found.D
    np.testing.assert_allclose(v, x @ W.T + c, rtol=1e-9, atol=1e-10)
    with pytest.raises(otf.NotAGradientFlow, match="W of the affine block"):
        otf.gradient_structure(otf.AffineBlock(np.array([[0.0, 1.0], [-1.0, 0.0]])))


@pytest.mark.parametrize(
    ("attention", "message", "residual"),
    [
        (otf.SoftmaxAttention([[0.0, 2.0], [0.0, 0.0]], np.eye(2)), "A is not symmetric", np.sqrt(2)),
        (otf.SinkhornAttention(np.diag([1.0, -1.0]), np.eye(2)), "D is not positive definite", 1.0),
        (otf.LinearAttention(np.eye(2), [[1.0, 1.0], [0.0, 1.0]]), "V is not sign D A", None),
        (otf.L2Attention(np.eye(2), 0.5 * np.eye(2), np.eye(2)), r"\|K\^T K\| / \|K\^T Q\| = 0.5", 0.5),
        (otf.MaskedAttention(otf.SoftmaxAttention(np.eye(2), np.eye(2))), "a mask", 1.0),
        (
            otf.MultiHeadAttention(
                [otf.SoftmaxAttention(np.eye(2), np.eye(2)), otf.SoftmaxAttention(3 * np.eye(2), np.eye(2))]
            ),
            "different twisted metrics",
            2.0,
        ),
        (
            otf.MultiHeadAttention(
                [otf.SoftmaxAttention(np.eye(2), np.eye(2)), otf.LinearAttention(np.eye(2), np.eye(2))]
            ),
            "none in common",
            1.0,
        ),
        (
            otf.MultiHeadAttention(
                [
                    otf.LinearAttention(np.eye(2), np.eye(2)),
                    otf.SinkhornAttention(np.eye(2), np.diag([1.0, 3.0])),
                ]
            ),
            "no common mobility",
            None,
        ),
    ],
    ids=["asymmetric", "indefinite", "sheared", "l2", "masked", "two-softmax", "mixed", "two-mobilities"],
)
def test_what_is_not_a_gradient_flow_says_why(attention, message, residual):
    with pytest.raises(otf.NotAGradientFlow, match=message) as caught:
        otf.gradient_structure(attention)
    if residual is not None:
        assert caught.value.residual == pytest.approx(residual, rel=1e-12)
    assert 0.05 < caught.value.residual < 10


def test_residual_does_not_depend_on_scale():
    A, _, V = problem(1)
    E = np.random.default_rng(11).standard_normal((3, 3))
    residuals = []
    for scale in (1.0, 1e-9, 1e9):
        with pytest.raises(otf.NotAGradientFlow) as caught:
            otf.gradient_structure(otf.SoftmaxAttention(scale * (A + 0.1 * E), V / scale))
        residuals.append(caught.value.residual)
    np.testing.assert_allclose(residuals, residuals[0], rtol=1e-9)


def test_a_flow_stops_at_the_edge_of_the_domain_of_its_energy():
    """d = 1, a = V = 1: -E_A is finite for S < 1 alone, which S = 1 / (2 - 2t) reaches at t = 1/2."""
    found = otf.gradient_structure(otf.SoftmaxAttention(1.0, 1.0))
    with pytest.warns(otf.NotConverged, match="edge of the energy's domain"):
        run = otf.gradient_flow(
            found.energy, otf.Gaussian([0.0], [[0.5]]), 0.8, metric=found.metric, save_at=[0.4, 0.8]
        )
    assert run.status == "step limit"
    assert run.last_times == pytest.approx(0.5, abs=1e-6)
    assert run.states[0].cov[0, 0] == pytest.approx(1 / 1.2, rel=1e-7)


def test_a_trial_step_that_leaves_the_domain_is_cut_and_nothing_raises():
    """Known fault: a stage that was NaN reached eigh and svd, whose errors ended the flow of the whole batch."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((12, 3, 3))
    A = 0.1 * (x + x.swapaxes(-1, -2))[0]
    start = otf.Gaussian(rng.standard_normal((12, 3)), x @ x.swapaxes(-1, -2))
    energy = otf.InteractionEnergy(A)
    finite = np.isfinite(energy.value(start))
    start = otf.Gaussian(start.mean[finite], start.cov[finite])
    for sign in (1, -1):
        for metric in (otf.BuresWasserstein(), otf.TwistedWasserstein(A, D=np.eye(3), sign=sign)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", otf.NotConverged)
                batch = otf.gradient_flow(sign * energy, start, 2.0, metric=metric, max_steps=30)
                one = otf.gradient_flow(
                    sign * energy,
                    otf.Gaussian(start.mean[0], start.cov[0]),
                    2.0,
                    metric=metric,
                    max_steps=30,
                )
            assert np.isfinite(batch.states[-1].cov).all()
            assert batch.status[0] == one.status
            values = np.asarray(batch.energies["energy"])
            assert (np.diff(values[:, 0]) <= 1e-9 * np.abs(values[:-1, 0])).all()


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]])
def test_an_energy_with_batched_parameters_gives_what_the_loop_gives(weights):
    x = np.random.default_rng(5).standard_normal((4, 2))
    A = np.stack([np.eye(2), np.diag([-2.0, 0.5])])
    p, stack = otf.Particles(x, weights), otf.InteractionEnergy(A)
    flow, steps = otf.gradient_flow(stack, p, 0.3), otf.jko(stack, p, 0.05, 2)
    for k in range(2):
        alone = otf.InteractionEnergy(A[k])
        for many, one in ((flow, otf.gradient_flow(alone, p, 0.3)), (steps, otf.jko(alone, p, 0.05, 2))):
            for a, b in ((many.states[0], one.states[0]), (many.states[-1], one.states[-1])):
                np.testing.assert_array_equal(a[k].weights, b.weights)
                np.testing.assert_allclose(a[k].mean, b.mean, rtol=1e-12, atol=1e-14)
                np.testing.assert_allclose(a[k].x, b.x, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(many.energies["energy"][:, k], one.energies["energy"], rtol=1e-13)
