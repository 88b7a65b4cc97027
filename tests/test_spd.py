"""PSD matrix functions: values, derivatives at repeated eigenvalues, rank deficiency."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from ot_transformers.spd import eigh_psd, numerical_rank_psd, solve_lyapunov, sqrt_psd


def spd(seed: int, d: int, r: int | None = None) -> torch.Tensor:
    X = torch.randn(d, r or d + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X @ X.T


@pytest.mark.parametrize(("d", "r"), [(1, 1), (4, None), (5, 2)])
def test_square_root_squares_to_the_matrix(d: int, r: int | None) -> None:
    S = spd(d, d, r)
    R = sqrt_psd(S)
    torch.testing.assert_close(R @ R, S, rtol=1e-13, atol=1e-13)
    assert float(torch.linalg.eigvalsh(R).min()) > -1e-13


def test_square_root_against_high_precision() -> None:
    S = spd(0, 3)
    with mpmath.workdps(40):
        exact = mpmath.sqrtm(mpmath.matrix(S.tolist()))
        expected = np.array([[float(exact[i, j].real) for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(sqrt_psd(S).numpy(), expected, rtol=1e-13, atol=1e-14)


def test_square_root_gradient_at_the_identity_is_finite() -> None:
    S = torch.eye(3, dtype=torch.float64).requires_grad_()
    G = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)
    (g,) = torch.autograd.grad((G * sqrt_psd(S)).sum(), S)
    torch.testing.assert_close(g, 0.25 * (G + G.T), rtol=1e-14, atol=1e-14)  # dR = dS / 2 at I


def test_covariance_of_129_samples_in_128_dimensions_float32() -> None:
    X = torch.randn(129, 128, generator=torch.Generator().manual_seed(0))
    X = X - X.mean(0)
    S = (X.T @ X / 129).requires_grad_()
    R = sqrt_psd(S)
    assert bool(torch.isfinite(R).all())
    torch.testing.assert_close(R @ R, S, rtol=0.0, atol=2e-5)
    (g,) = torch.autograd.grad(R.sum(), S)
    assert bool(torch.isfinite(g).all())


@pytest.mark.parametrize("repeat", [False, True])
def test_derivatives_of_first_and_second_order(repeat: bool) -> None:
    S = torch.diag(torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64)) if repeat else spd(1, 3)
    X = (0.5 * S).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sqrt_psd(x + x.T), (X,))
    assert torch.autograd.gradgradcheck(lambda x: sqrt_psd(x + x.T), (X,))


def test_nested_forward_mode_is_the_second_derivative() -> None:
    S, E = spd(2, 3), spd(3, 3)
    t, one = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)

    def f(s: torch.Tensor) -> torch.Tensor:
        return sqrt_psd(S + s * E)[0, 1]

    def slope(s: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(f, (s,), (one,))[1]

    nested = float(torch.func.jvp(slope, (t,), (one,))[1])
    s = t.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(s), s, create_graph=True)
    (second,) = torch.autograd.grad(first, s)
    assert nested == pytest.approx(float(second), rel=1e-11)


def test_lyapunov_equation() -> None:
    R, X = spd(4, 4), spd(5, 4)
    Y = solve_lyapunov(R, X)
    torch.testing.assert_close(R @ Y + Y @ R, X, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda r, x: solve_lyapunov(r + r.T, x + x.T),
        (R.clone().requires_grad_(), X.clone().requires_grad_()),
    )


def test_batch_is_the_loop_and_vmap_agrees() -> None:
    S = torch.stack([spd(k, 3) for k in range(4)])
    together = sqrt_psd(S)
    torch.testing.assert_close(together, torch.stack([sqrt_psd(s) for s in S]), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(torch.func.vmap(sqrt_psd)(S), together, rtol=1e-14, atol=1e-14)


def test_rounding_is_not_rank() -> None:
    S = spd(6, 5, 2)
    assert int(numerical_rank_psd(S)) == 2
    w, _ = eigh_psd(S)
    assert int((w > 0).sum()) == 2
    assert int(numerical_rank_psd(torch.diag(torch.tensor([1.0, 1e-3, 1e-9])), tol=1e-6)) == 2
