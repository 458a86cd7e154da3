"""Traces and row sequences: real values, and errors that name the file, the line and the value."""

import os
import statistics

import pytest

from bufpool.errors import BufpoolError
from bufpool.workloads import (
    Chunk,
    TraceError,
    Workload,
    chunks,
    constant,
    held,
    layered_trace,
    ramp,
    read_trace,
    synthetic_trace,
    two_lanes,
    unseen,
)


@pytest.fixture
def csv_file(tmp_path):
    def write(text):
        path = tmp_path / "trace.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_trace_values_in_file_order(csv_file):
    path = csv_file("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n2023-11-16,0,1\n\n2023-11-17, 396 ,109")
    assert read_trace(path) == [374, 0, 396]
    assert read_trace(path, "GeneratedTokens") == [44, 1, 109]


def test_trace_with_bom_crlf_and_quotes(csv_file):
    assert read_trace(csv_file(b'\xef\xbb\xbf"ContextTokens","a"\r\n"7","x, y"\r\n"8","z"\r\n')) == [7, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header line with a column 'ContextTokens', got an empty first line"),
        ("a,b\n1,2\n", "expected a column 'ContextTokens', got columns a, b"),
        (
            "ContextTokens\n12\n-3\n",
            "line 3: expected ContextTokens as an integer >= 0 of at most 15 digits, got '-3'",
        ),
        ("ContextTokens\n1.5\n", "line 2: expected ContextTokens as an integer >= 0 of at most 15 digits, got '1.5'"),
        ("ContextTokens\n1_000\n", "got '1_000'"),
        ("ContextTokens\n\u0661\n", "got '\u0661'"),
        ("ContextTokens\n" + "9" * 5000 + "\n", "of at most 15 digits, got '999"),
        ("a,ContextTokens\n1\n", "line 2: expected ContextTokens as an integer >= 0 of at most 15 digits, got nothing"),
        ("ContextTokens\n", "expected at least one request with ContextTokens > 0, got 0 requests without"),
        ("ContextTokens\n0\n0\n", "expected at least one request with ContextTokens > 0, got 2 requests without"),
        (b"ContextTokens\n\xff\n", "expected UTF-8 text, got byte 0xff"),
        ("ContextTokens\n" + "1" * 200_000 + "\n", "expected CSV, got a line that is not"),
    ],
)
def test_trace_errors_say_wanted_and_got(csv_file, text, message):
    path = csv_file(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 250


def test_trace_missing_or_a_folder(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.csv: expected a readable CSV file, got No such file or directory"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="expected a readable CSV file, got Is a directory") as caught:
        read_trace(tmp_path)
    assert isinstance(caught.value, BufpoolError)
    assert isinstance(caught.value, ValueError)


def test_synthetic_trace_is_like_a_conversation_trace():
    tokens = synthetic_trace(20_000, seed=3)
    percentiles = statistics.quantiles(tokens, n=100)
    assert percentiles[49] == pytest.approx(1000, rel=0.03)
    assert percentiles[98] == pytest.approx(4100, rel=0.06)
    assert min(tokens) >= 1
    assert max(tokens) <= 14_000


def test_synthetic_trace_is_fixed_by_its_seed():
    assert synthetic_trace(6) == synthetic_trace(6, seed=0) == [894, 1020, 1528, 943, 2357, 395]
    assert synthetic_trace(50, seed=1) != synthetic_trace(50, seed=2)
    assert synthetic_trace(50, seed=1)[:20] == synthetic_trace(20, seed=1)


def test_synthetic_trace_is_cut_at_its_maximum():
    assert max(synthetic_trace(400_000, seed=0)) == 14_000


def test_chunks_cut_each_prompt_by_itself():
    assert list(chunks([5, 0, 4, 9], 4)) == [
        Chunk(0, 0, 4),
        Chunk(0, 4, 1),
        Chunk(2, 0, 4),
        Chunk(3, 0, 4),
        Chunk(3, 4, 4),
        Chunk(3, 8, 1),
    ]


def test_chunks_of_a_huge_prompt_come_one_at_a_time():
    assert next(chunks([10**15], 2048)) == Chunk(0, 0, 2048)


def test_row_sequences():
    assert constant(7, 3).rows == (7, 7, 7)
    assert ramp(16384, 400).rows[:3] == (1, 42, 83)
    assert ramp(16384, 400).rows[-1] == 16384
    assert len(ramp(16384, 400).rows) == 400
    assert ramp(9, 1).rows == (1,)
    assert layered_trace([5, 2], 4, layers=3, calls=8).rows == (4, 4, 4, 1, 1, 1, 2, 2)
    assert two_lanes(3, 4).lanes == 2
    assert held([1, 2], 5) == Workload("held-5", (1, 2), lanes=1, hold=5)


def test_unseen_row_counts_occur_once():
    workload = unseen(1000, 800, seed=4)
    assert len(set(workload.rows)) == 800
    assert set(workload.rows) <= set(range(1, 1001))
    assert workload == unseen(1000, 800, seed=4)
    with pytest.raises(ValueError, match="expected at most max_rows = 10 different row counts, got 11"):
        unseen(10, 11)


@pytest.mark.skipif("BUFPOOL_TRACE" not in os.environ, reason="BUFPOOL_TRACE names no trace file")
def test_public_conversation_trace():
    tokens = read_trace(os.environ["BUFPOOL_TRACE"])
    assert (len(tokens), min(tokens), max(tokens), statistics.median(tokens)) == (19_366, 2, 14_050, 1020)
    synthetic = statistics.quantiles(synthetic_trace(20_000), n=100)
    real = statistics.quantiles(tokens, n=100)
    assert synthetic[49] == pytest.approx(real[49], rel=0.1)
    assert synthetic[98] == pytest.approx(real[98], rel=0.1)
