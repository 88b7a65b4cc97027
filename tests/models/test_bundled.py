"""The bundled cloud and heads against the model they come from."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

from ot_transformers.models import load_head, load_text, load_token_names, load_tokens


def test_cloud_is_singular_and_layer_normalised() -> None:
    tokens = load_tokens()
    assert (tokens.n, tokens.dim, tokens.x.dtype) == (334, 384, np.float32)
    # n centred points span n - 1 dimensions: the covariance has rank 333 of 384.
    assert int(tokens.to_gaussian().rank()) == 333
    np.testing.assert_allclose(tokens.weights, 1 / 334)


def test_file_is_below_two_megabytes_and_holds_no_pickle() -> None:
    resource = files("ot_transformers.models").joinpath("data/minilm_tokens.npz")
    with resource.open("rb") as stream:
        assert len(stream.read()) < 2e6
    with resource.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        assert not any(archive[name].dtype.hasobject for name in archive.files)


def test_tokens_spell_the_text() -> None:
    names = load_token_names()
    assert (names[0], names[-1]) == ("[CLS]", "[SEP]")
    spelled = "".join(t.removeprefix("##") for t in names[1:-1])
    assert spelled == load_text().lower().replace(" ", "")


def test_scale_of_a_head_is_explicit() -> None:
    head = load_head(4)
    assert head.scale == pytest.approx(32**-0.5, rel=1e-15)
    np.testing.assert_allclose(head.A(), head.K.T @ head.Q / np.sqrt(32.0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(head.A(scale=1.0), head.K.T @ head.Q, rtol=1e-5, atol=1e-6)
    # Of a float32 product the rank drowns in rounding; in float64 it is that of the factors.
    assert np.linalg.matrix_rank(head.double().V) == np.linalg.matrix_rank(head.double().A()) == 32


def test_changing_a_loaded_array_leaves_the_next_load_alone() -> None:
    first = load_head(0)
    first.Q[:] = 0.0
    assert np.abs(load_head(0).Q).max() > 0.01
