"""Certificates: proofs by computer that the interaction energy is not geodesically convex.

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
from ._proofs import FORMAT, Proof, decimal, prove
from ._records import write_atomically

__all__ = ["Certificate", "CertificateCheck", "check_certificate", "sealed"]


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
        """Ends of the enclosure of the second derivative, for reading (the exact ones are in `data`)."""
        low, high = self.data["enclosure"]["second_derivative"]
        return float(Fraction(low)), float(Fraction(high))

    @property
    def modulus(self) -> tuple[float, float]:
        """Ends of the enclosure of second derivative / |speed|^2."""
        low, high = self.data["enclosure"]["modulus"]
        return float(Fraction(low)), float(Fraction(high))

    def to_json(self) -> str:
        """The certificate as JSON text."""
        return json.dumps(self.data, indent=1) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the JSON file, atomically."""
        return write_atomically(path, self.to_json().encode("utf-8"))


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
        (float(second.low), float(second.high)),
        (float(modulus.low), float(modulus.high)),
    )


def _disagreement(data: Mapping[str, Any], proof: Proof) -> str:
    """What the file says that the proof does not give."""
    assert proof.enclosure is not None
    if data.get("proved") is not True:
        return "the file itself claims no proof"
    if data.get("claim") != proof.claim:
        return "the claim of the file is not what its rationals give"
    for name, interval in proof.enclosure._asdict().items():
        low, high = (Fraction(v) for v in data["enclosure"][name])
        if not (low <= interval.low and interval.high <= high):
            return f"the stored enclosure of the {name.replace('_', ' ')} does not hold the recomputed one"
    if Fraction(data["enclosure"]["second_derivative"][1]) >= 0:
        return "the stored enclosure of the second derivative reaches 0"
    if data.get("digest") != _digest(data):
        return "the digest of the file does not match: it was changed after it was written"
    return ""


def _read(path: str | Path) -> Mapping[str, Any]:
    try:
        data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as err:
        raise InvalidInput(f"certificate cannot be read: {path} ({err.strerror})") from err
    except ValueError as err:
        raise InvalidInput(f"certificate is not JSON: {path}") from err
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidInput(f"certificate must have format {FORMAT!r}: {path}")
    return data


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
