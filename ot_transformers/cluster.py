"""Ensembles on a Dask cluster (the extra `cluster`): chunks of a phase diagram run where the client says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .arrays import describe
from .errors import InvalidInput

__all__ = ["dask_mapper"]


def dask_mapper(client: Any) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]:
    """Return a `mapper` for `phase_diagram` that runs chunks on a `distributed.Client`, results in order.

    The result is that of one machine to the bit: the randomness of a chunk depends on the seed and its number
    alone.

    Parameters
    ----------
    client : distributed.Client

    Raises
    ------
    InvalidInput
        The client has no `map`, or the extra `cluster` is not installed.
    """
    try:
        from distributed import Client
    except ImportError as err:
        raise InvalidInput(
            "client needs the extra `cluster`: pip install 'ot-transformers[cluster]'"
        ) from err
    if not isinstance(client, Client):
        raise InvalidInput(f"client must be a distributed.Client, got {describe(client)}")

    def mapper(function: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
        # One after another where they are ready: each result is saved while the others still run.
        for future in client.map(function, list(jobs), pure=False):
            yield future.result()

    return mapper
