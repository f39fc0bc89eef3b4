"""Exceptions, one for each way in which a caller may want to react."""

from __future__ import annotations

from tiermgr import _abi


class TiermgrError(Exception):
    """A call failed. `status` is the number of tiermgr.h, `status_name` its name."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.status_name = _abi.STATUS_NAMES.get(status, "UNKNOWN")

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.status_name}]"


class InvalidArgumentError(TiermgrError, ValueError):
    """An argument is wrong."""


class NotManagedError(TiermgrError, ValueError):
    """The range is not memory of this client."""


class OutOfMemoryError(TiermgrError, MemoryError):
    """A limit is reached, no tier has room, or the process has no address space left."""


class NotPermittedError(TiermgrError, PermissionError):
    """The caller may not do this."""


class UnsupportedError(TiermgrError, NotImplementedError):
    """This daemon, library or kernel cannot do it."""


class NoDaemonError(TiermgrError, ConnectionRefusedError):
    """Nobody listens on the socket."""


class ConnectionLostError(TiermgrError, ConnectionError):
    """The daemon is away; try again later."""


class DataLostError(TiermgrError, OSError):
    """A device failed and bytes were lost."""


_BY_STATUS = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_MANAGED": NotManagedError,
    "NO_ROOM": OutOfMemoryError,
    "NO_MEMORY": OutOfMemoryError,
    "NOT_PERMITTED": NotPermittedError,
    "UNSUPPORTED": UnsupportedError,
    "VERSION": UnsupportedError,
    "NO_DAEMON": NoDaemonError,
    "CONNECTION_LOST": ConnectionLostError,
    "SHUTTING_DOWN": ConnectionLostError,
    "DATA_LOST": DataLostError,
}


def check(status: int) -> None:
    """Raises what belongs to a status that is not OK."""
    if status != 0:
        message = _abi.library().tiermgr_last_error().decode(errors="replace")
        kind = _BY_STATUS.get(_abi.STATUS_NAMES.get(status, ""), TiermgrError)
        raise kind(status, message)
