"""Certificates fail when anything in them is changed, with or without a new digest."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ot_transformers import (
    InteractionEnergy,
    TwistedWasserstein,
    Wasserstein,
    check_certificate,
    find_nonconvexity,
)
from ot_transformers.convexity import Certificate

METRIC = TwistedWasserstein(-np.eye(2), np.eye(2))
ENERGY = InteractionEnergy(-np.eye(2))


def resealed(data: dict[str, Any]) -> dict[str, Any]:
    """The digest that someone who tampers with care would put."""
    from ot_transformers.convexity.certificate import _digest

    return data | {"digest": _digest(data)}


def certificates() -> list[Certificate]:
    twisted = find_nonconvexity(ENERGY, METRIC, n=2, n_starts=1, max_iter=3, radius=0.5).certify()
    w2 = find_nonconvexity(ENERGY, Wasserstein(), n=2, n_starts=1, max_iter=3, radius=1.0).certify()
    return [twisted, w2]


def paths(node: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every leaf of the JSON is."""
    if isinstance(node, dict):
        return [p for k, v in node.items() for p in paths(v, (*prefix, k))]
    if isinstance(node, list):
        return [p for k, v in enumerate(node) for p in paths(v, (*prefix, k))]
    return [prefix]


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if value is None:
        return "0"
    try:
        return str(Fraction(value) + Fraction(1, 1024))
    except ValueError:
        return value + "."


def test_every_single_change_of_a_certificate_is_found(tmp_path: Path) -> None:
    from ot_transformers.errors import InvalidInput

    for certificate in certificates():
        for path in paths(certificate.data):
            data = copy.deepcopy(dict(certificate.data))
            node: Any = data
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = changed(node[path[-1]])
            file = tmp_path / "changed.json"
            file.write_text(json.dumps(data))
            if path == ("format",):
                with pytest.raises(InvalidInput, match="format"):
                    check_certificate(file)
                continue
            assert not check_certificate(file).valid, path


def test_a_changed_certificate_with_a_new_digest_fails_too(tmp_path: Path) -> None:
    """What the rationals do not prove is refused, however consistent the file looks."""
    file = tmp_path / "changed.json"
    for certificate in certificates():
        for path in paths(certificate.data):
            if path[0] in ("version", "digest", "format", "precision"):
                continue  # says nothing about the claim
            if path[0] == "enclosure":
                continue  # see below: a wider enclosure is a weaker, still true statement
            data = copy.deepcopy(dict(certificate.data))
            node: Any = data
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = changed(node[path[-1]])
            file.write_text(json.dumps(resealed(data)))
            assert not check_certificate(file).valid, path
        data = copy.deepcopy(dict(certificate.data))
        low, high = data["enclosure"]["second_derivative"]
        for bad in ([high, high + "1"], ["-1e-30", "-1e-31"], [low, "0"], ["1", "2"]):
            data["enclosure"]["second_derivative"] = bad
            file.write_text(json.dumps(resealed(data)))
            assert not check_certificate(file).valid, bad


def attacks(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What someone who knows the format could try, by name."""
    x = data["x"]
    twisted = data["kind"] == "twisted-hessian"
    A = data["energy"]["interactions"][0]["A"]

    def energy(factor: str, H: Any = None) -> dict[str, Any]:
        quadratic = None if H is None else {"H": H, "c": ["0", "0"]}
        return {"interactions": [{"factor": factor, "A": A}], "quadratic": quadratic}

    tried: dict[str, dict[str, Any]] = {
        "number for a string": {"x": [[float(Fraction(q)) for q in p] for p in x]},
        "exponent that fills the memory": {"x": [["1e999999999", *x[0][1:]], *x[1:]]},
        "long number": {"x": [["1" * 5000, *x[0][1:]], *x[1:]]},
        "division by zero": {"x": [["1/0", *x[0][1:]], *x[1:]]},
        "Arabic digits": {"x": [["\u0661", *x[0][1:]], *x[1:]]},
        "not a number": {"x": [["nan", *x[0][1:]], *x[1:]]},
        "point of another dimension": {"x": [[*x[0], "0"], *x[1:]]},
        "no points": {"x": []},
        "far points": {"x": [[str(10**6 * (k + 1)), "0"] for k in range(len(x))]},
        "further points than balls can write": {"x": [[str(10**30 * (k + 1)), "0"] for k in range(len(x))]},
        "weights not 1": {"x_weights": ["1"] * len(x)},
        "negative weight": {"x_weights": ["2", "-1", *["0"] * (len(x) - 2)]},
        "no mobility": {"D": [["0", "0"], ["0", "0"]]},
        "indefinite mobility": {"D": [["1", "2"], ["2", "1"]]},
        "mobility not symmetric": {"D": [["1", "1"], ["0", "1"]]},
        "other claim": {"claim": data["claim"] + " And the Riemann hypothesis holds."},
        "more than is proved": {"theorem": "F is not convex anywhere"},
        "precision true": {"precision": True},
        "precision huge": {"precision": 10**9},
        "precision text": {"precision": "128"},
        "no energy": {"energy": {"interactions": [], "quadratic": None}},
        "energy 0": {"energy": energy("0")},
        "energy of another sign": {"energy": energy("-1")},
        "a convex part that hides": {"energy": energy("1", [["900", "0"], ["0", "900"]])},
        "quadratic not symmetric": {"energy": energy("1", [["0", "1"], ["0", "0"]])},
        "unknown part of the energy": {"energy": {**data["energy"], "entropy": "1"}},
        "enclosure of numbers": {"enclosure": {k: [-1e9, 1e9] for k in data["enclosure"]}},
        "no enclosure": {"enclosure": None},
        "enclosure that lacks one": {"enclosure": {"second_derivative": data["enclosure"]["second_derivative"]}},
        "enclosure in the wrong order": {"enclosure": {k: v[::-1] for k, v in data["enclosure"].items()}},
        "enclosure that reaches 0": {"enclosure": {**data["enclosure"], "second_derivative": ["-100000", "0"]}},
        "proved 1": {"proved": 1},
        "kind of the other": {"kind": "w2-displacement" if twisted else "twisted-hessian"},
        "kind unknown": {"kind": ["twisted-hessian"]},
    }  # fmt: skip
    if twisted:
        tried |= {
            "two points are one": {"x": [x[0]] * len(x)},
            "weight 0": {"x_weights": ["1", *["0"] * (len(x) - 1)]},
            "no direction": {"v": [["0", "0"]] * len(x)},
            "metric not symmetric": {"A": [["-1", "1"], ["0", "-1"]]},
        }
    else:
        half = Fraction(1, 2)
        tried |= {
            "crossing plan": {"plan": [[0, 1, str(half)], [1, 0, str(half)]]},
            "plan without mass": {"plan": []},
            "negative mass": {"plan": [*data["plan"], [0, 1, "-1/4"], [1, 0, "1/4"]]},
            "row that is true": {"plan": [[True, 1, str(half)], *data["plan"][1:]]},
            "row outside": {"plan": [[-1, 0, str(half)], *data["plan"][1:]]},
            "no potentials": {"potentials": [["0", "0"], ["0", "0"]]},
            "time outside": {"t": "3/2"},
            "no movement": {"y": x},
        }
    return tried


def test_no_attack_passes_as_a_proof(tmp_path: Path) -> None:
    """Each with the digest that fits: refused in one line, without a traceback and in no time."""
    file = tmp_path / "attack.json"
    for certificate in certificates():
        data = dict(certificate.data)
        for name, change in attacks(data).items():
            file.write_text(json.dumps(resealed(data | change)))
            check = check_certificate(file)
            assert not check.valid, name
            assert 0 < len(check.reason) < 200, name
            assert "\n" not in check.reason, name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "x", "format": "y"}', "names a thing twice"),
        ('{"format": NaN}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"format": ' + "9" * 10_000 + "}", "not JSON"),
        ("\xff", "not JSON"),
        ('{"format": "ot_transformers certificate 1"}', "must have format"),
    ],
)
def test_text_that_is_no_certificate_is_refused(text: str, message: str, tmp_path: Path) -> None:
    from ot_transformers.errors import InvalidInput

    file = tmp_path / "text.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput, match=message):
        check_certificate(file)
