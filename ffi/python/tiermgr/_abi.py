"""The C ABI of include/tiermgr.h, by ctypes: structures, prototypes, and where the library is.

Nothing else of the package calls C. The names and the order of members are those of the header; a test
compares them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

# Version of the header that this file follows.
VERSION = (0, 1)

STATUS_NAMES = {
    0: "OK",
    -1: "INVALID_ARGUMENT",
    -2: "NOT_MANAGED",
    -3: "NO_ROOM",
    -4: "NOT_PERMITTED",
    -5: "UNSUPPORTED",
    -6: "VERSION",
    -7: "PROTOCOL",
    -8: "DATA_LOST",
    -9: "SHUTTING_DOWN",
    -10: "INTERNAL",
    -32: "NO_DAEMON",
    -33: "CONNECTION_LOST",
    -34: "NO_MEMORY",
    -35: "SYSTEM",
    -36: "TOO_MANY_CLIENTS",
    -37: "INSIDE",
}
CLASSES = {"default": 0, "latency": 1, "standard": 2, "bulk": 3}
KINDS = {"heap": 0, "weights": 1, "kv": 2, "activation": 3}
ADVICE = {
    "normal": 0,
    "willneed": 1,
    "cold": 2,
    "sequential": 3,
    "random": 4,
    "cyclic": 5,
    "read_mostly": 6,
    "dontneed": 7,
}


class ClientOptions(ctypes.Structure):
    """`tiermgr_client_options`."""

    _fields_ = [
        ("size", c_uint32),
        ("class_", c_uint32),
        ("socket", c_char_p),
        ("name", c_char_p),
    ]


class RegionOptions(ctypes.Structure):
    """`tiermgr_region_options`."""

    _fields_ = [
        ("size", c_uint32),
        ("backing", c_uint32),
        ("class_", c_uint32),
        ("kind", c_uint32),
        ("name", c_char_p),
    ]


class Residency(ctypes.Structure):
    """`tiermgr_residency`."""

    _fields_ = [
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("resident_bytes", c_uint64),
        ("parked_bytes", c_uint64),
        ("absent_bytes", c_uint64),
        ("unarmed_bytes", c_uint64),
        ("poisoned_bytes", c_uint64),
    ]


class Statistics(ctypes.Structure):
    """`tiermgr_statistics`."""

    _fields_ = [
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("faults", c_uint64),
        ("recalled_pages", c_uint64),
        ("prefetched_pages", c_uint64),
        ("zeroed_pages", c_uint64),
        ("rescued_pages", c_uint64),
        ("parked_pages", c_uint64),
        ("parked_clean_pages", c_uint64),
        ("store_written_bytes", c_uint64),
        ("store_read_bytes", c_uint64),
        ("store_errors", c_uint64),
        ("poisoned_pages", c_uint64),
        ("forks", c_uint64),
        ("dram_now_bytes", c_uint64),
        ("limbo_now_bytes", c_uint64),
        ("credit_now_bytes", c_uint64),
        ("parked_now_bytes", c_uint64),
        ("budget_now_bytes", c_uint64),
        ("pinned_now_bytes", c_uint64),
    ]


# Result and arguments of every function.
PROTOTYPES = {
    "tiermgr_status_name": (c_char_p, [c_int]),
    "tiermgr_last_error": (c_char_p, []),
    "tiermgr_version": (c_char_p, []),
    "tiermgr_page_size": (c_size_t, []),
    "tiermgr_connect": (c_int, [POINTER(ClientOptions), POINTER(c_void_p)]),
    "tiermgr_disconnect": (c_int, [c_void_p]),
    "tiermgr_region_create": (
        c_int,
        [c_void_p, c_size_t, POINTER(RegionOptions), POINTER(c_void_p)],
    ),
    "tiermgr_region_destroy": (c_int, [c_void_p]),
    "tiermgr_region_address": (c_void_p, [c_void_p]),
    "tiermgr_region_bytes": (c_size_t, [c_void_p]),
    "tiermgr_alloc": (c_int, [c_void_p, c_size_t, c_size_t, POINTER(c_void_p)]),
    "tiermgr_alloc_zeroed": (c_int, [c_void_p, c_size_t, c_size_t, POINTER(c_void_p)]),
    "tiermgr_free": (c_int, [c_void_p, c_void_p]),
    "tiermgr_advise": (c_int, [c_void_p, c_void_p, c_size_t, c_int]),
    "tiermgr_prefetch": (c_int, [c_void_p, c_void_p, c_size_t]),
    "tiermgr_pin": (c_int, [c_void_p, c_void_p, c_size_t, POINTER(c_uint64)]),
    "tiermgr_unpin": (c_int, [c_void_p, c_uint64]),
    "tiermgr_residency_query": (c_int, [c_void_p, c_void_p, c_size_t, POINTER(Residency)]),
    "tiermgr_statistics_query": (c_int, [c_void_p, POINTER(Statistics)]),
}


def _candidates() -> list[str]:
    named = os.environ.get("TIERMGR_LIBRARY")
    if named:
        return [named]
    beside = pathlib.Path(__file__).parent
    names = ["libtiermgr.so.0", "libtiermgr.so"]
    return [str(beside / name) for name in names if (beside / name).exists()] + names


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The loaded library; ImportError where it is not found or is of another version.

    Calls release the GIL, so that other threads run while one waits for the daemon.
    """
    failures = []
    for candidate in _candidates():
        try:
            loaded = ctypes.CDLL(candidate)
        except OSError as error:
            failures.append(str(error))
            continue
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
        version = loaded.tiermgr_version().decode()
        if tuple(int(part) for part in version.split(".")[:2]) != VERSION:
            raise ImportError(
                f"{candidate} is version {version}, but this package is made for "
                f"{VERSION[0]}.{VERSION[1]}; install the package of the same release"
            )
        return loaded
    raise ImportError(
        "libtiermgr.so.0 was not found; set TIERMGR_LIBRARY to its path (tried: "
        + "; ".join(failures)
        + ")"
    )
