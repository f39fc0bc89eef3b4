"""Whole programs natively and in half of their memory: the short part of `scripts/programs`."""

import pytest

import cpython
import outages
import sqlite
import ways

FLAGS = ("--small",)


def sqlite_rows(rows):
    return ways.Case("sqlite-rows", "", lambda way: sqlite.rows(way, rows, 3), moves=True, outside_mib=64)


def natively_and_in_half(case, folder):
    native = ways.measure(case, folder)
    seen = ways.measure(case, folder, ways.half_of(native), FLAGS)
    assert ways.judge(case, native, seen) == []
    return native


def test_cpythons_own_tests(folder):
    names = ("test_dict", "test_list", "test_fork1", "test_json")
    case = ways.Case("cpython", "", cpython.own_tests(names, 150), cpython.judge_outcomes(cpython.KNOWN))
    natively_and_in_half(case, folder)


def test_children_share_an_array_by_fork(folder):
    pytest.importorskip("numpy")
    natively_and_in_half(ways.Case("fork", "", lambda way: cpython.forked_array(way, 192, 3), moves=True), folder)


def test_sqlite_whose_daemon_is_stopped_and_killed(folder):
    case = sqlite_rows(30_000)
    native = natively_and_in_half(case, folder)
    seen = outages.measure_in_trouble(case, folder, ways.half_of(native), FLAGS)
    assert ways.judge(case, native, seen) == []


def test_without_a_daemon_a_program_runs_natively_or_not_at_all(folder):
    case = sqlite_rows(2000)
    native = ways.measure(case, folder)
    seen = outages.measure_absent(case, folder, FLAGS)
    assert ways.judge(case, native, seen) == []


def test_what_a_suite_says_is_read(folder):
    """A judge that finds nothing in what it reads would find all programs right."""
    path = folder / "found.xml"
    path.write_text("<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase>"
                    "<testcase name='c'><skipped/></testcase></testsuite></testsuites>")
    found = ways.outcomes(path)
    assert found == {".a": "passed", ".b": "failure", ".c": "skipped"}
    judge = ways.judge_outcomes({".c": "known"})
    assert judge(found, found) == []
    assert judge(found, {".a": "failure", ".b": "failure"}) == [".a: natively passed, here failure"]
