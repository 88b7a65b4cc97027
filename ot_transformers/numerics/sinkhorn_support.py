"""Total support: whether a masked kernel can be scaled to its marginals at all."""

from __future__ import annotations

import numpy as np
import ot
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from ..errors import InvalidInput

__all__ = ["check_total_support"]

_CAUSAL = (
    "mask is causal: its only doubly stochastic matrix is the identity, each token seeing itself alone; "
)


def check_total_support(mask: Tensor, a: Tensor, b: Tensor) -> None:
    """Reject a mask unless some coupling of (a, b) is positive on exactly its pairs.

    Sinkhorn scaling converges to kappa > 0 on the mask if and only if each allowed pair carries mass in some
    coupling supported on the mask. A feasible coupling comes from an exact transport problem; a pair without
    mass in it can get some if and only if it lies on a cycle of the residual graph (same strong component).

    Raises
    ------
    InvalidInput
        With the number of pairs that no coupling can use; a causal mask is named.
    """
    allowed = mask.detach().cpu().numpy().astype(bool)
    n, m = allowed.shape
    if (n, m) != (a.shape[-1], b.shape[-1]):
        raise InvalidInput(f"mask must have shape {(a.shape[-1], b.shape[-1])}, got {(n, m)}")
    causal = n == m and n > 1 and bool((allowed == np.tril(np.ones((n, n), dtype=bool))).all())
    for wa, wb in zip(a.reshape(-1, n), b.reshape(-1, m), strict=True):
        u, v = (w.detach().double().cpu().numpy() for w in (wa, wb))
        live = allowed & (u > 0)[:, None] & (v > 0)[None, :]
        plan = ot.emd(u / u.sum(), v / v.sum(), (~live).astype(float), numItermax=10_000_000)
        if plan[~live].sum() > 1e-9:
            raise InvalidInput(
                f"mask admits no coupling of the marginals: {plan[~live].sum():.3g} of the mass has "
                "no allowed pair"
            )
        i, j = np.nonzero(live)
        p, q = np.nonzero(plan > 1e-15)
        graph = coo_array(
            (np.ones(i.size + p.size), (np.r_[i, q + n], np.r_[j + n, p])), shape=(n + m, n + m)
        )
        _, label = connected_components(graph, directed=True, connection="strong")
        dead = int((label[i] != label[j + n]).sum())
        if dead:
            raise InvalidInput(
                (_CAUSAL if causal else "")
                + f"mask has no total support: {dead} of its {i.size} allowed pairs carry no mass in any "
                "coupling of the marginals, so that Sinkhorn iterations never settle; remove them, or use "
                "softmax or L2 attention"
            )
