"""Certificates: proofs by computer that an energy is not geodesically convex.

A certificate is JSON with exact rationals as strings. `check_certificate` proves its claim again from the
rationals alone and believes no stored number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ._balls import require_flint
from ._proofs import FORMAT, Proof, decimal, interval, prove
from ._records import write_record

__all__ = ["Certificate", "CertificateCheck", "cannot", "check_certificate", "sealed"]

_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class Certificate:
    """A claim about exact rationals, and the enclosure that proves it, or the reason why it does not.

    Attributes
    ----------
    data : dict
        What is written as JSON: rationals as strings, the claim, the enclosures, the precision in bits.
    proved : bool
        Whether the second derivative is enclosed strictly below 0 and everything else holds exactly.
    reason : str
        "" if proved, else what fails.
    """

    data: Mapping[str, Any]
    proved: bool
    reason: str

    @property
    def kind(self) -> str:
        """The kind of proof: w2-displacement or twisted-hessian."""
        return str(self.data["kind"])

    @property
    def claim(self) -> str:
        """What is proved, in words."""
        return str(self.data["claim"])

    @property
    def enclosure(self) -> tuple[float, float]:
        """Ends of the enclosure of the second derivative, for reading (the exact ones are in `data`); NaN if none."""
        return self._ends("second_derivative")

    @property
    def modulus(self) -> tuple[float, float]:
        """Ends of the enclosure of second derivative / |speed|^2."""
        return self._ends("modulus")

    def _ends(self, name: str) -> tuple[float, float]:
        if "enclosure" not in self.data:
            return float("nan"), float("nan")
        low, high = self.data["enclosure"][name]
        return _to_float(Fraction(low)), _to_float(Fraction(high))

    def to_json(self) -> str:
        """The certificate as JSON text."""
        return json.dumps(self.data, indent=1) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the JSON file, atomically."""
        return write_record(path, self.to_json().encode("utf-8"))


@dataclass(frozen=True, eq=False)
class CertificateCheck:
    """What a check found.

    Attributes
    ----------
    valid : bool
        Whether the claim was proved again and the file says exactly that.
    reason : str
        "" if valid, else what fails.
    claim : str
        The claim as the rationals of the file give it (not as the file words it).
    enclosure, modulus : (float, float)
        Recomputed, at 64 bits more than the file asks for.
    """

    valid: bool
    reason: str
    claim: str
    enclosure: tuple[float, float]
    modulus: tuple[float, float]


def check_certificate(path: str | Path | Certificate) -> CertificateCheck:
    """Prove the claim of a certificate file again, from its rationals alone.

    The file must be what `Certificate.save` writes: its digest, its claim and its enclosures must be those
    that the rationals give; the recomputed enclosure, at 64 bits more, must lie inside the stored one and
    below 0.

    Raises
    ------
    InvalidInput
        No such file, or not a certificate at all.
    OTTransformersError
        The extra `certify` is not installed.
    """
    require_flint()
    data = path.data if isinstance(path, Certificate) else _read(path)
    proof = prove(data, extra_bits=64)
    reason = proof.reason or _disagreement(data, proof)
    ends = proof.enclosure
    if ends is None:
        return CertificateCheck(False, reason, proof.claim, (float("nan"),) * 2, (float("nan"),) * 2)
    second, modulus = ends.second_derivative, ends.modulus
    return CertificateCheck(
        not reason,
        reason,
        proof.claim,
        (_to_float(second.low), _to_float(second.high)),
        (_to_float(modulus.low), _to_float(modulus.high)),
    )


def _to_float(value: Fraction) -> float:
    """The nearest float, infinite beyond the floating range."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _disagreement(data: Mapping[str, Any], proof: Proof) -> str:
    """What the file says that the proof does not give."""
    assert proof.enclosure is not None
    if data.get("proved") is not True:
        return "the file itself claims no proof"
    if data.get("claim") != proof.claim:
        return "the claim of the file is not what its rationals give"
    if data.get("reason") != "" or not isinstance(data.get("version"), str):
        return "the reason of the file must be empty and its version a string"
    found, stored = proof.enclosure._asdict(), data.get("enclosure")
    if not isinstance(stored, dict) or set(stored) != set(found):
        return f"the file must hold enclosures of {', '.join(found)}, and nothing else"
    for name, recomputed in found.items():
        ends = interval(stored[name])
        if ends is None or not ends.contains(recomputed):
            return f"the stored enclosure of the {name.replace('_', ' ')} does not hold the recomputed one"
        if name == "second_derivative" and ends.high >= 0:
            return "the stored enclosure of the second derivative reaches 0"
    if data.get("digest") != _digest(data):
        return "the digest of the file does not match: it was changed after it was written"
    return ""


def _read(path: str | Path) -> Mapping[str, Any]:
    try:
        raw = Path(path).expanduser().read_bytes()
    except OSError as err:
        raise InvalidInput(f"certificate cannot be read: {path} ({err.strerror})") from err
    if len(raw) > _BYTES:
        raise InvalidInput(f"certificate has {len(raw)} bytes, at most {_BYTES} are read: {path}")
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as err:
        raise InvalidInput(f"certificate is not JSON, or names a thing twice: {path}") from err
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidInput(f"certificate must have format {FORMAT!r}: {path}")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; with a name twice, readers differ on what it says."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def cannot(reason: str) -> Certificate:
    """The result where no proof is possible, and why."""
    return Certificate(
        {"format": FORMAT, "kind": "none", "claim": "", "proved": False, "reason": reason}, False, reason
    )


def sealed(data: dict[str, Any], precision: int, reason: str = "") -> Certificate:
    """Prove, and write down claim, enclosure and digest."""
    from .._version import __version__

    content: dict[str, Any] = {"format": FORMAT, "version": __version__, "precision": precision, **data}
    proof = prove(content) if not reason else Proof(reason, "", None)
    content |= {"claim": proof.claim, "proved": not proof.reason, "reason": proof.reason}
    if proof.enclosure is not None:
        parts = proof.enclosure._asdict().items()
        content["enclosure"] = {name: [decimal(i.low), decimal(i.high)] for name, i in parts}
    content["digest"] = _digest(content)
    return Certificate(content, not proof.reason, proof.reason)


def _digest(data: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in data.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
