"""Streaming log G, its derivatives of all modes, and the tilted law against quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ot_transformers.numerics import tilted
from ot_transformers.numerics.tilted import log_interaction, tilted_barycentre, tilted_gaussian

RNG = np.random.default_rng(5)
A = torch.tensor([[0.3, -0.5], [0.4, -0.7]], dtype=torch.float64)


@pytest.fixture(params=[1 << 21, 20], ids=["dense", "streaming"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tilted, "_DENSE", request.param)
    return int(request.param)


def test_values_at_tokens_and_at_other_points(block: int) -> None:
    x, p = torch.from_numpy(RNG.normal(size=(2, 9, 2))), torch.from_numpy(RNG.normal(size=(2, 5, 2)))
    w = torch.from_numpy(RNG.dirichlet(np.ones(9), size=2))
    for points in (x, p):
        kernel = torch.exp(points @ A @ x.mT) * w.unsqueeze(-2)
        torch.testing.assert_close(
            log_interaction(x, w, A, points), kernel.sum(-1).log(), rtol=1e-13, atol=1e-14
        )
        log_g, barycentre = tilted_barycentre(x, w, A, points)
        torch.testing.assert_close(log_g, kernel.sum(-1).log(), rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(
            barycentre, kernel @ x / kernel.sum(-1, keepdim=True), rtol=1e-13, atol=1e-14
        )
    torch.testing.assert_close(log_interaction(x, w, A), log_interaction(x, w, A, x), rtol=0, atol=0)


def test_derivatives_of_all_modes(block: int) -> None:
    x = torch.from_numpy(RNG.normal(size=(6, 2))).requires_grad_()
    p = torch.from_numpy(RNG.normal(size=(3, 2))).requires_grad_()
    w = torch.from_numpy(RNG.dirichlet(np.ones(6))).requires_grad_()
    B = A.clone().requires_grad_()
    assert torch.autograd.gradcheck(log_interaction, (x, w, B, p), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(log_interaction, (x, w, B, p))
    assert torch.autograd.gradcheck(lambda *a: tilted_barycentre(*a)[1], (x, w, B, p), check_forward_ad=True)


def test_large_scores_and_absent_tokens_do_not_overflow(block: int) -> None:
    x = torch.tensor([[30.0, 0.0], [0.0, 30.0], [40.0, 40.0]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    eye = torch.eye(2, dtype=torch.float64)
    log_g = log_interaction(x, w, eye)
    expected = [900 - math.log(2), 900 - math.log(2), 1200.0]
    np.testing.assert_allclose(log_g.detach(), expected, rtol=1e-15)
    for g in torch.autograd.grad(log_g.sum(), (x, w)):
        assert torch.isfinite(g).all()


def test_tilted_law_against_quadrature_at_a_singular_covariance() -> None:
    m, direction = torch.tensor([0.2, -0.3], dtype=torch.float64), torch.tensor([0.6, 0.5]).double()
    z, q = (torch.from_numpy(t) for t in np.polynomial.hermite_e.hermegauss(60))
    q = q / q.sum()
    x = m + z[:, None] * direction
    joint = q[:, None] * q[None, :] * torch.exp(x @ A @ x.mT)
    law = tilted_gaussian(m, torch.outer(direction, direction), A)
    Z = joint.sum()
    assert float(law.log_z) == pytest.approx(float(Z.log()), rel=1e-12)
    for weights, mean, cov in (
        (joint.sum(1) / Z, law.mean_x, law.cov_x),
        (joint.sum(0) / Z, law.mean_y, law.cov_y),
    ):
        expected = weights @ x
        torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-13)
        centred = x - expected
        torch.testing.assert_close(cov, centred.mT @ (weights[:, None] * centred), rtol=1e-11, atol=1e-13)


def test_sums_without_derivatives_are_the_recorded_ones(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilted, "_BLOCK", 20)
    x = torch.from_numpy(30.0 * RNG.normal(size=(2, 9, 2)))  # e^{900} overflows outside the log domain
    w = torch.from_numpy(RNG.dirichlet(np.ones(9), size=2))
    w[0, 3] = 0.0
    plain = *tilted_barycentre(x, w, A), log_interaction(x, w, A)
    recorded = *tilted_barycentre(x.requires_grad_(), w, A), log_interaction(x, w, A)
    for found, expected in zip(plain, recorded, strict=True):
        assert expected.requires_grad
        assert not found.requires_grad
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
