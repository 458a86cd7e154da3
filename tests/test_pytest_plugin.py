"""The fixture ``write_only``, in test runs of its own."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

pytest_plugins = "pytester"

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "bufpool.testing.pytest_plugin"

SUITE = """
import pytest, torch
from bufpool import OutputSpec, WriteContractError

SPEC = OutputSpec(out=((4, 2), torch.float32), lse=((4,), torch.float32))
Q = torch.ones(1)

def fill(outputs):
    outputs.out.fill_(1)
    outputs.lse.fill_(2)

def test_good(write_only):
    write_only(fill, SPEC, 5, Q)
    write_only(fn=fill, spec=SPEC, rows=0, like=[Q, Q])

def test_unwritten(write_only):
    def leaves_one(outputs):
        outputs.out.fill_(1)
        outputs.lse[:-1] = 2

    write_only(leaves_one, SPEC, 5, Q)

def test_expected(write_only):
    with pytest.raises(WriteContractError, match="out: expected a result that does not depend on former content"):
        write_only(lambda outputs: (outputs.out.nan_to_num_(3), outputs.lse.fill_(2)), SPEC, 5, Q)

def test_other_errors_pass_through(write_only):
    with pytest.raises(ZeroDivisionError):
        write_only(lambda outputs: 1 / 0, SPEC, 5, Q)
    with pytest.raises(TypeError, match="rows"):
        write_only(fill, SPEC, 5.0, Q)
"""


@pytest.fixture
def run_suite(pytester, monkeypatch):
    """Runs a suite in a process of its own, with the plugin loaded once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    is_installed = any(entry.value == PLUGIN for entry in importlib.metadata.entry_points(group="pytest11"))

    def run(suite, *options):
        pytester.makepyfile(suite)
        load = () if is_installed else ("-p", PLUGIN)
        return pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", *load, *options)

    return run


def test_fixture(run_suite):
    result = run_suite(SUITE)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*write_only(leaves_one, SPEC, 5, Q)*",
            "E*WriteContractError: lse: expected every element to be written, got row 4, column 0 as it was (not*",
            "FAILED *::test_unwritten - *",
        ]
    )
    result.stdout.no_fnmatch_line("*write_contract.py*")
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")


def test_fixture_is_listed_with_its_meaning(run_suite):
    result = run_suite("def test(): pass", "--fixtures")
    result.stdout.fnmatch_lines(["write_only*", "*Check that a function overwrites all of its outputs and nothing else*"])


def test_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    section = re.search(r"^\[project\.entry-points\.pytest11\]\n((?:[^\[\n].*\n)+)", text, re.M)
    assert section is not None
    assert section.group(1).strip() == f'bufpool = "{PLUGIN}"'
