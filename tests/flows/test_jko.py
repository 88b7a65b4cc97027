"""JKO steps: closed forms, decrease of energy, order one against the flow."""

from __future__ import annotations

import numpy as np
import pytest

import ot_transformers as otf

from .closed_forms import random_spd

VARIANTS = ["implicit", "linearised", "explicit"]


def sinkhorn_problem(d=2):
    rng = np.random.default_rng(0)
    B = rng.standard_normal((d, d))
    A, D = 0.5 * (B + B.T), random_spd(rng, d) + 0.5 * np.eye(d)
    found = otf.gradient_structure(otf.SinkhornAttention(A, -D @ A, tol=1e-12))
    return found, otf.Gaussian(rng.standard_normal(d), random_spd(rng, d))


def test_steps_of_a_quadratic_potential_are_exact():
    """F = E|x|^2 / 2: implicit steps divide by 1 + tau, explicit ones multiply by 1 - tau."""
    energy = otf.PotentialEnergy(lambda x: 0.5 * x.square().sum(-1))
    x = np.random.default_rng(1).standard_normal((6, 2))
    for variant, factor in (("implicit", 1 / 1.3), ("linearised", 1 / 1.3), ("explicit", 0.7)):
        p = otf.jko(energy, otf.Particles(x), 0.3, 3, variant=variant, tol=1e-11).states[-1]
        np.testing.assert_allclose(p.x, factor**3 * x, rtol=1e-8, atol=1e-9)
        g = otf.jko(energy, otf.Gaussian(np.ones(2), np.eye(2)), 0.3, 3, variant=variant, tol=1e-11).states[
            -1
        ]
        np.testing.assert_allclose(g.cov, factor**6 * np.eye(2), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["gaussian", "particles"])
def test_order_one_against_the_flow(kind, variant):
    found, g = sinkhorn_problem()
    mu = g if kind == "gaussian" else otf.Particles(0.5 * np.random.default_rng(2).standard_normal((5, 2)))
    flow = otf.gradient_flow(found.energy, mu, 0.4, metric=found.metric, save_at=[0.4], rtol=1e-9)
    errors = []
    for n in (8, 16):
        run = otf.jko(found.energy, mu, 0.4 / n, n, metric=found.metric, variant=variant, tol=1e-8)
        assert run.status == "completed"
        errors.append(_gap(run.states[-1], flow.states[-1]))
    orders = -np.diff(np.log(errors)) / np.log(2.0)
    assert np.abs(orders - 1).max() < 0.1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["gaussian", "particles"])
def test_order_one_in_the_twisted_metric(kind, variant):
    attention = otf.SoftmaxAttention(np.diag([1.0, -0.6]), np.diag([1.0, -0.6]))
    found = otf.gradient_structure(attention)
    rng = np.random.default_rng(3)
    mu = otf.Gaussian(0.2 * np.ones(2), 0.2 * np.eye(2))
    if kind == "particles":
        mu = otf.Particles(0.4 * rng.standard_normal((6, 2)))
    flow = otf.solve(attention, mu, 0.2, save_at=[0.2], rtol=1e-10)
    errors = []
    for n in (2, 4, 8):
        run = otf.jko(found.energy, mu, 0.2 / n, n, metric=found.metric, variant=variant)
        errors.append(_gap(run.states[-1], flow.states[-1]))
        if variant != "explicit":
            assert (run.stats["increases"] < 0).all()
    orders = -np.diff(np.log(errors)) / np.log(2.0)
    assert abs(orders[0] - 1) < 0.3
    assert abs(orders[1] - 1) < 0.15


def _gap(a, b):
    if isinstance(a, otf.Gaussian):
        return np.linalg.norm(a.cov - b.cov) + np.linalg.norm(a.mean - b.mean)
    return np.linalg.norm(a.x - b.x)


@pytest.mark.parametrize("tau", [0.01, 1.0, 100.0])
def test_energy_never_increases(tau):
    """For every step size, also far beyond the stability limit of explicit steps."""
    found, g = sinkhorn_problem()
    target = otf.KLDivergence(otf.Gaussian(np.zeros(2), np.diag([1.0, 0.2])))
    for energy, metric in ((found.energy, found.metric), (target, None)):
        run = otf.jko(energy, g, tau, 4, metric=metric)
        size = np.abs(run.energies["energy"]).max()
        assert (run.stats["increases"] <= 1e-12 * size).all()
        assert (run.stats["gradient_norms"][run.stats["converged"]] <= 1e-9).all()


def test_linearised_steps_are_implicit_ones_where_the_metric_is_flat():
    found, g = sinkhorn_problem()
    a, b = (
        otf.jko_step(found.energy, g, 0.2, metric=found.metric, variant=v, tol=1e-11) for v in VARIANTS[:2]
    )
    np.testing.assert_allclose(a.measure.cov, b.measure.cov, rtol=1e-7)
    np.testing.assert_allclose(a.measure.mean, b.measure.mean, rtol=1e-7)
    assert a.energy_after == pytest.approx(b.energy_after, rel=1e-12)


def test_a_batch_gives_what_the_loop_gives():
    rng = np.random.default_rng(4)
    energy = otf.SelfTransportEnergy(np.diag([1.0, -0.5]))
    m, S = rng.standard_normal((3, 2)), random_spd(rng, 2, (3,))
    x = 0.5 * rng.standard_normal((3, 5, 2))
    for variant in VARIANTS:
        together = otf.jko(energy, otf.Gaussian(m, S), 0.1, 2, variant=variant)
        clouds = otf.jko(energy, otf.Particles(x), 0.1, 2, variant=variant, tol=1e-7)
        assert together.energies["energy"].shape == (3, 3)
        assert together.status.tolist() == ["completed"] * 3
        for k in range(3):
            alone = otf.jko(energy, otf.Gaussian(m[k], S[k]), 0.1, 2, variant=variant)
            np.testing.assert_allclose(together.states[-1].cov[k], alone.states[-1].cov, rtol=1e-7, atol=1e-9)
            one = otf.jko(energy, otf.Particles(x[k]), 0.1, 2, variant=variant, tol=1e-7)
            np.testing.assert_allclose(clouds.states[-1].x[k], one.states[-1].x, rtol=1e-5, atol=1e-6)


def test_rank_of_a_factor_is_kept():
    g = otf.Gaussian.from_factor(np.zeros(3), np.array([[1.0], [0.5], [-0.2]]))
    for variant in VARIANTS:
        run = otf.jko(otf.SelfTransportEnergy(-np.eye(3)), g, 0.1, 3, variant=variant)
        assert all(int(s.rank(tol=1e-20)) == 1 for s in run.states)


def test_an_inner_problem_that_stops_early_is_reported():
    found, _ = sinkhorn_problem()
    with pytest.warns(otf.NotConverged, match="JKO steps did not converge"):
        run = otf.jko(found.energy, otf.Particles(np.eye(2)), 5.0, 2, metric=found.metric, max_iter=1)
    assert run.status == "step limit"
    assert not run.stats["converged"].all()


def test_progress_and_files(tmp_path):
    seen: list[float] = []
    found, g = sinkhorn_problem()
    run = otf.jko(found.energy, g, 0.1, 4, metric=found.metric, progress=seen.append)
    assert seen == [0.25, 0.5, 0.75, 1.0]
    back = otf.Trajectory.load(run.save(tmp_path / "steps.npz"))
    np.testing.assert_array_equal(back.stats["n_iter"], run.stats["n_iter"])
    np.testing.assert_array_equal(back.at(0.25).cov, run.states[2].cov)


def test_gaussians_with_a_batch_of_energies():
    """Known fault: implicit steps with a batch of energies were refused."""
    A = np.stack([0.2 * np.eye(2), np.diag([-1.0, 0.5])])
    stack, g = otf.InteractionEnergy(A), otf.Gaussian([1.0, 0.0], 0.5 * np.eye(2))
    for run, build in (
        (otf.jko(stack, g, 0.05, 2), lambda e: otf.jko(e, g, 0.05, 2)),
        (
            otf.jko(stack, g, 0.05, 2, variant="linearised"),
            lambda e: otf.jko(e, g, 0.05, 2, variant="linearised"),
        ),
        (otf.gradient_flow(stack, g, 0.3), lambda e: otf.gradient_flow(e, g, 0.3)),
    ):
        for k in range(2):
            alone = build(otf.InteractionEnergy(A[k])).states[-1]
            np.testing.assert_allclose(run.states[-1][k].cov, alone.cov, rtol=1e-9)
            np.testing.assert_allclose(run.states[-1][k].mean, alone.mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "particles", "twisted"])
def test_a_batch_of_energies_steps_member_by_member(kind):
    """Sums, multiples and targets with a batch (2, 1), on a batch (3,) of measures: a batch (2, 3)."""
    rng = np.random.default_rng(11)
    A, tau = np.stack([-0.3 * np.eye(2), np.diag([-1.0, 0.5])])[:, None], 0.05
    x, y = 0.5 * rng.standard_normal((3, 4, 2)), 0.5 * rng.standard_normal((2, 1, 4, 2))
    m, S, n, T = x[:, 0], random_spd(rng, 2, (3,)), y[:, :, 0], random_spd(rng, 2, (2, 1))
    metric = otf.TwistedWasserstein(-np.eye(2), D=np.eye(2)) if kind == "twisted" else None
    mu = otf.Gaussian(m, S) if kind == "gaussian" else otf.Particles(x)
    target = otf.Gaussian(n, T) if kind == "gaussian" else otf.Particles(y)
    build = lambda B, nu: 0.5 * otf.SelfTransportEnergy(B) + otf.SquaredWasserstein(nu)  # noqa: E731
    energy = build(A, target)
    assert energy.batch_shape == (2, 1)
    together = otf.jko_step(energy, mu, tau, metric)
    assert together.measure.batch_shape == (2, 3)
    assert together.energy_after.shape == (2, 3)
    for i, k in np.ndindex(2, 3):
        alone = otf.jko_step(build(A[i, 0], target[i, 0]), mu[k], tau, metric)
        assert together.energy_after[i, k] == pytest.approx(alone.energy_after, rel=1e-8)
        got, one = together.measure[i, k], alone.measure
        if kind == "gaussian":
            np.testing.assert_allclose(got.mean, one.mean, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(got.cov, one.cov, rtol=1e-8)
        else:
            np.testing.assert_allclose(got.x, one.x, rtol=1e-6, atol=1e-7)


def test_an_energy_that_does_not_name_its_batched_parameters():
    class Mine(otf.Energy):
        batch_shape = (2,)

        def raw_gaussian(self, mean, cov):
            return mean.square().sum(-1).expand(2)

    with pytest.raises(otf.InvalidInput, match="does not name its parameters"):
        otf.jko_step(Mine(), otf.Gaussian(np.ones(2), np.eye(2)), 0.1)
