"""NumPy arrays that may be larger than DRAM.

    import tiermgr

    weights = tiermgr.empty((100_000, 10_000), "float32", kind="weights")
    tiermgr.advise(weights, "cyclic")
    with tiermgr.pin(weights[:10]):
        ...

The functions of this module use one client, which connects at the first call; `Client` makes others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Optional, Tuple, Union

from tiermgr._client import Block, Client, HasArrayInterface, Lease, Residency, Statistics
from tiermgr._errors import (
    ConnectionLostError,
    DataLostError,
    InvalidArgumentError,
    NoDaemonError,
    NotManagedError,
    NotPermittedError,
    OutOfMemoryError,
    TiermgrError,
    UnsupportedError,
)

if TYPE_CHECKING:
    import numpy
    import numpy.typing

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Client",
    "ConnectionLostError",
    "DataLostError",
    "InvalidArgumentError",
    "Lease",
    "NoDaemonError",
    "NotManagedError",
    "NotPermittedError",
    "OutOfMemoryError",
    "Residency",
    "Statistics",
    "TiermgrError",
    "UnsupportedError",
    "advise",
    "client",
    "empty",
    "pin",
    "prefetch",
    "residency",
    "stats",
]

_shared: Optional[Client] = None
_shared_lock = threading.Lock()


def client() -> Client:
    """The client of this module; connects at the first call."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Client()
        return _shared


def empty(
    shape: Union[int, Tuple[int, ...]],
    dtype: numpy.typing.DTypeLike = float,
    *,
    kind: Optional[str] = None,
    name: Optional[str] = None,
) -> numpy.ndarray[Any, Any]:
    """`Client.empty` of the module's client."""
    return client().empty(shape, dtype, kind=kind, name=name)


def advise(of: HasArrayInterface, advice: str) -> None:
    """`Client.advise` of the module's client."""
    client().advise(of, advice)


def prefetch(of: HasArrayInterface) -> None:
    """`Client.prefetch` of the module's client."""
    client().prefetch(of)


def pin(of: HasArrayInterface) -> Lease:
    """`Client.pin` of the module's client."""
    return client().pin(of)


def residency(of: HasArrayInterface) -> Residency:
    """`Client.residency` of the module's client."""
    return client().residency(of)


def stats() -> Statistics:
    """`Client.stats` of the module's client."""
    return client().stats()
