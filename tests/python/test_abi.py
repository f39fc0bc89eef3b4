"""The ctypes declarations against the C header."""

import ctypes
import re

import pytest
from conftest import ROOT

from tiermgr import _abi

HEADER = (ROOT / "include" / "tiermgr.h").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)


def c_struct(name):
    """Members of a struct of the header, as (type, name)."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}}", CODE, re.DOTALL).group(1)
    members = [line.strip() for line in body.split(";") if line.strip()]
    return [re.match(r"(.*?)\s*(\w+)$", member).groups() for member in members]


def c_enum(name, prefix):
    body = re.search(rf"typedef enum {name} \{{(.*?)\}}", CODE, re.DOTALL).group(1)
    pairs = re.findall(r"(\w+) = (-?\d+)", body)
    return {constant.removeprefix(prefix): int(value) for constant, value in pairs}


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("tiermgr_client_options", _abi.ClientOptions),
        ("tiermgr_region_options", _abi.RegionOptions),
        ("tiermgr_residency", _abi.Residency),
        ("tiermgr_statistics", _abi.Statistics),
    ],
)
def test_structs_are_those_of_the_header(name, structure):
    types = {
        ctypes.c_uint32: "uint32_t",
        ctypes.c_uint64: "uint64_t",
        ctypes.c_char_p: "const char *",
    }
    assert [(types[kind], field) for field, kind in structure._fields_] == c_struct(name)


def test_numbers_are_those_of_the_header():
    lower = lambda table: {name.lower(): value for name, value in table.items()}
    assert _abi.CLASSES == lower(c_enum("tiermgr_class", "TIERMGR_CLASS_"))
    assert _abi.KINDS == lower(c_enum("tiermgr_kind", "TIERMGR_KIND_"))
    assert _abi.ADVICE == lower(c_enum("tiermgr_advice", "TIERMGR_ADVICE_"))
    status = c_enum("tiermgr_status", "TIERMGR_")
    status = {value: name.removeprefix("E_") for name, value in status.items()}
    assert _abi.STATUS_NAMES == status


def test_every_function_is_declared():
    functions = set(re.findall(r"TIERMGR_API [^;]*?\b(tiermgr_\w+)\(", CODE))
    assert set(_abi.PROTOTYPES) == functions
    for name, (_, arguments) in _abi.PROTOTYPES.items():
        declared = re.search(rf"\b{name}\(([^)]*)\)", CODE).group(1).strip()
        count = 0 if declared == "void" else declared.count(",") + 1
        assert len(arguments) == count, name


def test_the_library_knows_the_same_names(built):
    library = _abi.library()
    for status, name in _abi.STATUS_NAMES.items():
        assert library.tiermgr_status_name(status).decode() == name
