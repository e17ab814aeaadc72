import csv
from pathlib import Path
from statistics import mean

import pytest

from squall.errors import TraceError
from squall.workload.traces import parse_calendar, read_trace

SECOND = 1_000_000_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OWN = "arrived_at_s,num_prompt_tokens,num_output_tokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


@pytest.mark.parametrize(
    ("text", "nanos"),
    [
        ("1970-01-02 00:00:01", 86_401 * SECOND),
        ("1970-01-01 00:00:00.1234567", 123_456_700),
        ("1970-01-01T00:00:00.5Z", SECOND // 2),
        ("1970-01-01 00:00:00.009930+00:00", 9_930_000),
        ("1970-01-01 00:00:01+00:00", SECOND),
        ("1970-01-01 02:00:00.25+01:30", 1800 * SECOND + SECOND // 4),
        ("1970-01-01 00:00:00.1234567891", 123_456_789),
        ("2023-11-16 18:15:46.6805900", 1_700_158_546_680_590_000),
    ],
)
def test_both_years_time_formats_are_read_to_the_nanosecond(text: str, nanos: int) -> None:
    assert parse_calendar(text) == nanos


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2023-11-16",
        "2023-13-16 18:15:46",
        "2023-11-16 18:15:75.5",
        "2023-11-16 18:15:46.",
        "2023-11-16 18:15:46.5+2",
    ],
)
def test_what_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_calendar(text)


def test_calendar_times_count_from_the_earliest_and_bom_crlf_and_comments_do_not_matter(trace: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n\r\n# a remark, with commas\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    trace.write_bytes(b"\xef\xbb\xbf# about this trace\r\n" + (AZURE.strip() + "\r\n" + rows).encode())
    read = read_trace(trace)
    assert read.arrived_at == [0, 4_314_579_000]
    assert (read.num_prompt_tokens, read.num_output_tokens, read.notes) == ([374, 396], [44, 109], ())


def test_seconds_count_from_zero_under_either_set_of_names(trace: Path) -> None:
    for header in (OWN, "arrived_at,num_prefill_tokens,num_decode_tokens\n"):
        trace.write_text(header + "1.5,10,20\n2,11,21\n")
        read = read_trace(trace)
        assert read.arrived_at == [1_500_000_000, 2_000_000_000]
        assert (read.num_prompt_tokens, read.num_output_tokens) == ([10, 11], [20, 21])


def test_columns_may_stand_in_any_order_among_others(trace: Path) -> None:
    trace.write_text("num_output_tokens,model,arrived_at_s,num_prompt_tokens\n5,x,0.25,7\n")
    read = read_trace(trace)
    assert (read.arrived_at, read.num_prompt_tokens, read.num_output_tokens) == ([250_000_000], [7], [5])


def test_unsorted_rows_are_sorted_stably_and_it_is_said(trace: Path) -> None:
    trace.write_text(OWN + "5,10,10\n1,20,5\n1,30,5\n4,40,1\n")
    read = read_trace(trace)
    assert read.num_prompt_tokens == [20, 30, 40, 10]
    assert read.notes == (f"{trace}: 1 rows came before the row above them; sorted by arrival",)


def test_rows_without_output_count_as_one_token_and_it_is_said(trace: Path) -> None:
    trace.write_text(OWN + "0,10,0\n1,20,5\n2,20,0.0\n")
    read = read_trace(trace)
    assert read.num_output_tokens == [1, 5, 1]
    assert read.notes == (f"{trace}: 2 rows of 0 output tokens count as 1",)


def test_whole_numbers_may_be_written_as_floats(trace: Path) -> None:
    trace.write_text(OWN + "0,7564.0,192.0\n")
    read = read_trace(trace)
    assert (read.num_prompt_tokens, read.num_output_tokens) == ([7564], [192])


def test_a_file_of_lengths_alone_has_no_arrivals(trace: Path) -> None:
    trace.write_text("num_prefill_tokens,num_decode_tokens\n3772,54\n")
    assert read_trace(trace).arrived_at is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("-1,10,10", r"arrived_at_s is '-1'; it must be seconds from the start, 0 or more"),
        ("nan,10,10", r"arrived_at_s is 'nan'"),
        ("inf,10,10", r"arrived_at_s is 'inf'"),
        ("1787267980.08,10,10", r"arrived_at_s is '1787267980.08'"),
        (",10,10", r"arrived_at_s is ''"),
        ("3,-5,10", r"num_prompt_tokens is '-5'; it must be a whole number of at least 1"),
        ("3,0,10", r"num_prompt_tokens is '0'"),
        ("3,10.5,10", r"num_prompt_tokens is '10.5'"),
        ("3,nan,10", r"num_prompt_tokens is 'nan'"),
        ("3,10,-1", r"num_output_tokens is '-1'; it must be a whole number of at least 0"),
        ("3,10,ten", r"num_output_tokens is 'ten'"),
        ("3,1e300,10", r"num_prompt_tokens is '1e300'"),
        ("3,10", r"has 2 of 3 columns; the file may be cut off"),
    ],
)
def test_a_row_that_is_no_request_is_named_by_file_and_line(trace: Path, row: str, message: str) -> None:
    trace.write_text(f"# comment\n{OWN}0,1,1\n{row}\n")
    with pytest.raises(TraceError, match=rf"trace.csv line 4: {message}"):
        read_trace(trace)


def test_a_bad_date_is_named_by_file_and_line(trace: Path) -> None:
    trace.write_text(AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:61:46,374,44\n")
    with pytest.raises(TraceError, match=r"trace.csv line 3: TIMESTAMP is '2023-11-16 18:61:46'; it must be a date and time"):
        read_trace(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing but a comment\n", "is empty"),
        (OWN, "has a header but no rows"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:3d74\n", "is a git-lfs pointer"),
        ("arrived_at_s,num_prompt_tokens\n0,1\n", r"line 1: no column num_output_tokens or num_decode_tokens \(csv format\)"),
        ("TIMESTAMP,ContextTokens\n0,1\n", r"line 1: no column GeneratedTokens \(azure format\); the columns are TIMESTAMP, Con"),
        ("time,ContextTokens,GeneratedTokens\n0,1,1\n", r"line 1: no column TIMESTAMP \(azure format\)"),
        ('{"timestamp": 0, "input_length": 5}\n', "holds JSON lines; supported are CSV files"),
    ],
)
def test_a_file_that_is_no_trace_says_why(trace: Path, text: str, message: str) -> None:
    trace.write_text(text)
    with pytest.raises(TraceError, match=rf"trace.csv:? {message}"):
        read_trace(trace)


def test_binary_and_missing_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "trace.csv.gz").write_bytes(b"\x1f\x8b\x08\xff\xff")
    with pytest.raises(TraceError, match=r"trace.csv.gz: is not text in UTF-8; unpack it first"):
        read_trace(tmp_path / "trace.csv.gz")
    with pytest.raises(TraceError, match=r"none.csv: no such file; workload.path is relative to"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match=r"cannot be read"):
        read_trace(tmp_path)


def test_a_format_that_is_asked_for_is_insisted_on(trace: Path) -> None:
    trace.write_text(OWN + "0,1,1\n")
    with pytest.raises(TraceError, match=r"no column TIMESTAMP and no ContextTokens and no GeneratedTokens \(azure format\)"):
        read_trace(trace, "azure")


@pytest.mark.shared
@pytest.mark.parametrize(
    "name", ["azure2023_code.csv", "azure2023_conv.csv", "vidur_splitwise_code.csv", "vidur_splitwise_conv.csv"]
)
def test_statistics_of_real_traces_match_the_published_ones(shared: Path, name: str) -> None:
    rows = csv.DictReader((shared / "data" / "traces" / "STATS.csv").read_text().splitlines())
    stats = next(row for row in rows if row["file"] == name)
    trace = read_trace(shared / "data" / "traces" / name)
    times, prompts, outputs = trace.arrived_at, trace.num_prompt_tokens, trace.num_output_tokens
    assert times is not None
    assert len(times) == int(stats["rows"])
    assert mean(prompts) == pytest.approx(float(stats["prompt_mean"]), abs=0.05)
    assert (min(prompts), max(prompts)) == (int(stats["prompt_min"]), int(stats["prompt_max"]))
    assert mean(outputs) == pytest.approx(float(stats["output_mean"]), abs=0.05)
    assert (min(outputs), max(outputs)) == (int(stats["output_min"]), int(stats["output_max"]))
    assert (times[-1] - times[0]) / SECOND == pytest.approx(float(stats["duration_s"]), abs=0.05)
    assert len(times) / ((times[-1] - times[0]) / SECOND) == pytest.approx(float(stats["mean_rps"]), abs=0.0006)
    assert trace.notes == ()


@pytest.mark.shared
def test_the_two_copies_of_the_azure_trace_agree(shared: Path) -> None:
    original = read_trace(shared / "data" / "traces" / "azure2023_conv.csv")
    copy = read_trace(shared / "data" / "traces" / "vidur_splitwise_conv.csv")
    assert original.num_prompt_tokens == copy.num_prompt_tokens
    assert original.arrived_at is not None
    assert copy.arrived_at is not None
    assert all(abs(one - other) < 1_000 for one, other in zip(original.arrived_at, copy.arrived_at, strict=True))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("t01_bom_crlf.csv", 2),
        ("t02_fraction7_and_tz_mixed.csv", 3),
        ("t03_unsorted_dup.csv", 4),
        ("t06_float_token_counts.csv", 1),
        ("t07_no_timestamp_column.csv", 1),
    ],
)
def test_odd_files_that_hold_requests_are_read(shared: Path, name: str, rows: int) -> None:
    assert len(read_trace(shared / "data" / "oddities" / "fixtures" / name).num_prompt_tokens) == rows


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t04_zero_tokens.csv", "line 1: no column num_prompt_tokens"),
        ("t05_negative_nan_inf.csv", "line 2: arrived_at is '-1.0'"),
        ("t08_seconds_in_ms_format.jsonl", "holds JSON lines"),
        ("t10_hash_ids_len_mismatch.jsonl", "holds JSON lines"),
        ("t11_huge_lengths.jsonl", "holds JSON lines"),
        ("t13_truncated_last_line.jsonl", "holds JSON lines"),
        ("t14_git_lfs_pointer.jsonl", "is a git-lfs pointer"),
        ("t15_comment_header.csv", "line 3: no column num_prompt_tokens"),
    ],
)
def test_odd_files_that_hold_none_say_why(shared: Path, name: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"{name}:? {message}"):
        read_trace(shared / "data" / "oddities" / "fixtures" / name)


@pytest.mark.shared
def test_the_2024_time_format_is_read_from_real_rows(shared: Path, trace: Path) -> None:
    rows = csv.DictReader((shared / "data" / "traces" / "fissionspec_azure2024_code_1024.csv").read_text().splitlines())
    kept = [(row["source_timestamp"], float(row["arrival_ms"]), row["prompt_tokens"], row["output_tokens"]) for row in rows]
    trace.write_text(AZURE + "".join(f"{time},{prompt},{output}\n" for time, _, prompt, output in kept))
    times = read_trace(trace).arrived_at
    assert times is not None
    assert [time / 1e6 for time in times] == pytest.approx([ms for _, ms, _, _ in kept], abs=0.001)
