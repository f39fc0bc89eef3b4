"""Clients, blocks and leases.

Who owns what: an array refers to its block, a block to the connection, and so does a client. The
connection ends when the last of them has gone: closing a client never takes the memory from under an
array. When the interpreter ends nothing is freed one by one; the process takes all with it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import weakref
from typing import TYPE_CHECKING, Any, Optional, Protocol, Tuple, Union

from tiermgr import _abi
from tiermgr._errors import check

if TYPE_CHECKING:
    import numpy
    import numpy.typing


class HasArrayInterface(Protocol):
    """An array, or whatever else says where its bytes are."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counters of a client and its forked descendants. `*_now_bytes` go up and down."""

    faults: int
    recalled_pages: int
    prefetched_pages: int
    zeroed_pages: int
    rescued_pages: int
    parked_pages: int
    parked_clean_pages: int
    store_written_bytes: int
    store_read_bytes: int
    store_errors: int
    poisoned_pages: int
    forks: int
    dram_now_bytes: int
    limbo_now_bytes: int
    credit_now_bytes: int
    parked_now_bytes: int
    budget_now_bytes: int
    pinned_now_bytes: int


@dataclasses.dataclass(frozen=True)
class Residency:
    """Where the bytes of a range are. The members add up to the range, in whole pages."""

    resident_bytes: int
    parked_bytes: int
    absent_bytes: int
    unarmed_bytes: int
    poisoned_bytes: int


def _members(structure: ctypes.Structure, wanted: type) -> dict[str, int]:
    return {field.name: getattr(structure, field.name) for field in dataclasses.fields(wanted)}


def _number(table: dict[str, int], name: str, what: str) -> int:
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"{what} must be one of {', '.join(table)}, not {name!r}") from None


class _Connection:
    """A connected `tiermgr_client`, disconnected with the last reference to it."""

    def __init__(self, socket: Optional[str], name: Optional[str], class_: int) -> None:
        library = _abi.library()
        options = _abi.ClientOptions(
            size=ctypes.sizeof(_abi.ClientOptions),
            class_=class_,
            socket=None if socket is None else os.fsencode(socket),
            name=None if name is None else name.encode(),
        )
        handle = ctypes.c_void_p()
        check(library.tiermgr_connect(ctypes.byref(options), ctypes.byref(handle)))
        self.handle = handle
        ending = weakref.finalize(self, library.tiermgr_disconnect, handle)
        ending.atexit = False


class Block:
    """Managed memory; NumPy takes it as an array of bytes (`numpy.asarray(block)`).

    Freed when nothing refers to it or to an array over it.
    """

    def __init__(
        self, connection: _Connection, nbytes: int, kind: Optional[str], name: Optional[str]
    ) -> None:
        library = _abi.library()
        self._connection = connection
        self.nbytes = nbytes
        if kind is None and name is None:
            address = ctypes.c_void_p()
            check(
                library.tiermgr_alloc(
                    connection.handle, max(nbytes, 1), 0, ctypes.byref(address)
                )
            )
            self.address = int(address.value or 0)
            ending = weakref.finalize(self, _free, connection, self.address)
        else:
            options = _abi.RegionOptions(
                size=ctypes.sizeof(_abi.RegionOptions),
                kind=_number(_abi.KINDS, kind or "heap", "kind"),
                name=None if name is None else name.encode(),
            )
            region = ctypes.c_void_p()
            check(
                library.tiermgr_region_create(
                    connection.handle, max(nbytes, 1), ctypes.byref(options), ctypes.byref(region)
                )
            )
            self.address = int(library.tiermgr_region_address(region) or 0)
            ending = weakref.finalize(self, _destroy, connection, region)
        ending.atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


# The connection is an argument so that it outlives what is freed.
def _free(connection: _Connection, address: int) -> None:
    _abi.library().tiermgr_free(connection.handle, address)


def _destroy(connection: _Connection, region: ctypes.c_void_p) -> None:
    _abi.library().tiermgr_region_destroy(region)


class Lease:
    """A promise that a range stays in memory. Ends with `release()` or at the end of `with`."""

    def __init__(self, connection: _Connection, lease: int, of: HasArrayInterface) -> None:
        self._connection: Optional[_Connection] = connection
        self._lease = lease
        self._of: Optional[HasArrayInterface] = of

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        connection, self._connection, self._of = self._connection, None, None
        if connection is not None:
            check(_abi.library().tiermgr_unpin(connection.handle, self._lease))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _span(of: HasArrayInterface) -> Tuple[int, int]:
    """First address and length of a contiguous array."""
    interface = of.__array_interface__
    if interface.get("strides") is not None:
        flags = getattr(of, "flags", None)
        if flags is None or not (flags.c_contiguous or flags.f_contiguous):
            raise ValueError("the array must be contiguous: name a range of it by a plain slice")
    itemsize = getattr(of, "itemsize", 1)
    return int(interface["data"][0]), math.prod(interface["shape"]) * itemsize


def _pages(of: HasArrayInterface, inside: bool = False) -> Tuple[int, int]:
    """The pages of an array: all that it touches, or only those that are its alone."""
    page = _abi.library().tiermgr_page_size()
    start, nbytes = _span(of)
    end = start + nbytes
    if inside:
        start, end = -(-start // page) * page, end // page * page
    else:
        start, end = start // page * page, -(-end // page) * page
    return start, max(end - start, 0)


class Client:
    """A connection to tiermgrd.

    `socket` is the daemon's ($TIERMGR_SOCKET, else the system's, where None); `name` is shown in lists;
    `class_` is "latency", "standard" or "bulk": who gives way to whom. Raises NoDaemonError where
    nobody listens. Any thread may use it. After a fork parent and child both may.
    """

    def __init__(
        self,
        socket: Optional[str] = None,
        name: Optional[str] = None,
        class_: str = "default",
    ) -> None:
        number = _number(_abi.CLASSES, class_, "class_")
        self._open: Optional[_Connection] = _Connection(socket, name, number)

    @property
    def _connection(self) -> _Connection:
        if self._open is None:
            raise ValueError("the client is closed")
        return self._open

    def close(self) -> None:
        """Gives the connection up. Arrays that were made with it stay valid until they are gone."""
        self._open = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def block(
        self, nbytes: int, kind: Optional[str] = None, name: Optional[str] = None
    ) -> Block:
        """Managed memory of `nbytes`.

        With `kind` ("heap", "weights", "kv", "activation") or `name` it is a region of its own, shown
        in lists, zeroed, in units of 2 MiB; otherwise it comes from the client's arenas and its contents
        are undefined.
        """
        if nbytes < 0:
            raise ValueError("a block cannot have a negative size")
        return Block(self._connection, nbytes, kind, name)

    def empty(
        self,
        shape: Union[int, Tuple[int, ...]],
        dtype: numpy.typing.DTypeLike = float,
        *,
        kind: Optional[str] = None,
        name: Optional[str] = None,
    ) -> numpy.ndarray[Any, Any]:
        """An array like `numpy.empty`, in managed memory. `kind` and `name` as in `block`."""
        import numpy

        wanted = numpy.dtype(dtype)
        if wanted.hasobject:
            raise ValueError("managed memory cannot hold Python objects")
        extent = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(extent) * wanted.itemsize
        block = self.block(nbytes, kind, name)
        return numpy.asarray(block).view(wanted).reshape(extent)

    def advise(self, of: HasArrayInterface, advice: str) -> None:
        """Tells how an array will be used: "normal", "willneed", "cold", "sequential", "random",
        "cyclic", "read_mostly". With "dontneed" its whole pages are dropped and read as zeros."""
        number = _number(_abi.ADVICE, advice, "advice")
        start, nbytes = _pages(of, inside=advice == "dontneed")
        if nbytes:
            library = _abi.library()
            check(library.tiermgr_advise(self._connection.handle, start, nbytes, number))

    def prefetch(self, of: HasArrayInterface) -> None:
        """Starts to bring an array in, and does not wait for it."""
        start, nbytes = _pages(of)
        if nbytes:
            check(_abi.library().tiermgr_prefetch(self._connection.handle, start, nbytes))

    def pin(self, of: HasArrayInterface) -> Lease:
        """Brings an array in, waits for it, and holds it in memory until the lease ends."""
        start, nbytes = _pages(of)
        lease = ctypes.c_uint64()
        connection = self._connection
        check(
            _abi.library().tiermgr_pin(connection.handle, start, nbytes, ctypes.byref(lease))
        )
        return Lease(connection, lease.value, of)

    def residency(self, of: HasArrayInterface) -> Residency:
        """Where the pages of an array are now."""
        start, nbytes = _pages(of)
        found = _abi.Residency(size=ctypes.sizeof(_abi.Residency))
        check(
            _abi.library().tiermgr_residency_query(
                self._connection.handle, start, nbytes, ctypes.byref(found)
            )
        )
        return Residency(**_members(found, Residency))

    def stats(self) -> Statistics:
        """Counters of this client and its forked descendants."""
        found = _abi.Statistics(size=ctypes.sizeof(_abi.Statistics))
        check(
            _abi.library().tiermgr_statistics_query(self._connection.handle, ctypes.byref(found))
        )
        return Statistics(**_members(found, Statistics))
