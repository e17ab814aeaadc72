import csv
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars
import pytest

from squall.errors import TraceError
from squall.workload.build import build
from squall.workload.spec import TraceWorkload
from squall.workload.traces import read_trace

SECOND = 1_000_000_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OWN = "arrived_at_s,num_prompt_tokens,num_output_tokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def test_calendar_times_count_from_the_earliest_and_bom_crlf_and_comments_do_not_matter(trace: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n\r\n# a remark, with commas\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    trace.write_bytes(b"\xef\xbb\xbf# about this trace\r\n" + (AZURE.strip() + "\r\n" + rows).encode())
    read = read_trace(trace)
    assert read.arrived_at == [0, 4_314_579_000]
    assert (read.num_prompt_tokens, read.num_output_tokens, read.notes) == ([374, 396], [44, 109], ())


def test_marks_within_a_file_and_blanks_around_names_and_dates_do_not_matter(trace: Path) -> None:
    trace.write_text("# joined from two files\n\ufeff\ufeff" + AZURE.replace(",", " ,\xa0") + " 2023-11-16 18:15:46.5\t,374,44\n")
    assert read_trace(trace).arrived_at == [0]


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
        ("1787267980.08,10,10", r"arrival time counts from 1970, those above from the start; a trace has one clock"),
        ("17872679800800,10,10", r"arrived_at_s is '17872679800800'; it must be .* 0 or more and at most 4,611,686,018$"),
        (",10,10", r"arrived_at_s is ''"),
        ("3,-5,10", r"num_prompt_tokens is '-5'; it must be a whole number of at least 1"),
        ("3,0,10", r"num_prompt_tokens is '0'"),
        ("3,10.5,10", r"num_prompt_tokens is '10.5'"),
        ("3,nan,10", r"num_prompt_tokens is 'nan'"),
        ("3,10,-1", r"num_output_tokens is '-1'; it must be a whole number of at least 0"),
        ("3,10,ten", r"num_output_tokens is 'ten'"),
        ("3,1e300,10", r"num_prompt_tokens is '1e300'; it must be .* of at least 1 and at most 4,294,967,296$"),
        ("3,10,4294967297", r"num_output_tokens is '4294967297'; it must be .* of at least 0 and at most 4,294,967,296$"),
        ("3,10", r"has 2 of 3 columns; the file may be cut off"),
    ],
)
def test_a_row_that_is_no_request_is_named_by_file_and_line(trace: Path, row: str, message: str) -> None:
    trace.write_text(f"# comment\n{OWN}0,1,1\n{row}\n")
    with pytest.raises(TraceError, match=rf"trace.csv line 4: {message}"):
        read_trace(trace)


def test_dates_of_two_clocks_are_refused(trace: Path) -> None:
    """Seconds from the start that somebody turned into dates are in 1970."""
    trace.write_text(AZURE + "2023-11-16 18:15:46.68,374,44\n1970-01-01 00:00:04.2,374,44\n")
    with pytest.raises(TraceError, match=r"trace.csv line 3: arrival time counts from the start, those above from 1970"):
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
        ("arrived_at_s,num_prompt_tokens\n0,1\n", r"line 1: no column num_output_tokens \(squall format\)"),
        ("TIMESTAMP,ContextTokens\n0,1\n", r"line 1: no column GeneratedTokens \(azure format\); the columns are TIMESTAMP, Con"),
        ("time,ContextTokens,GeneratedTokens\n0,1,1\n", r"line 1: no column TIMESTAMP \(azure format\)"),
        ('{"timestamp": 0, "input_length": 5}\n', r"line 1: no column output_length \(mooncake format\)"),
        ('[{"timestamp": 0}]', "begins with a JSON array; write one object a line"),
        ("<!DOCTYPE html>\n<html>", "is a web page, not a file of data"),
    ],
)
def test_a_file_that_is_no_trace_says_why(trace: Path, text: str, message: str) -> None:
    trace.write_text(text)
    with pytest.raises(TraceError, match=rf"trace.csv:? {message}"):
        read_trace(trace)


def test_binary_and_missing_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "trace.csv.gz").write_bytes(b"\x1f\x8b\x08\xff\xff")
    with pytest.raises(TraceError, match=r"trace.csv.gz: is not text in UTF-8; unpack or convert it first"):
        read_trace(tmp_path / "trace.csv.gz")
    with pytest.raises(TraceError, match=r"none.csv: no such file; paths in \[workload\] are relative to"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="is a folder; give a file in it"):
        read_trace(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(TraceError, match="is a pipe or a device, which gives its content once at most; write it to a file first"):
        build(TraceWorkload("trace.csv"), 0, tmp_path)


AIBRIX = "timestamp_ms,prompt_tokens,output_tokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": 5, "hash_ids": %s}\n'
BAILIAN = (
    '{"chat_id": %s, "parent_chat_id": %s, "timestamp": %s, "input_length": 20, "output_length": 5, "turn": 1, "hash_ids": %s}\n'
)
LMCACHE = "project,session_id,turn,timestamp_raw,input_chars,output_chars,common_prefix_chars_with_previous_turn\n"
VLLM = '{"request_id": "a", "input_toks": %s, "output_toks": 9, "arrival_time": %s, "queued_ts": 27536.6}\n'


@pytest.mark.parametrize(
    ("text", "times_ms", "prompts"),
    [
        (AZURE + "2023-11-16 18:15:46,374,44\n2023-11-16 18:15:47,5,6\n", [0, 1000], [374, 5]),
        (BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1,20,21,API log\n", [5000, 45_000], [472, 1]),
        (AIBRIX + "21,909,22\n26,557,21\n", [21, 26], [909, 557]),
        ("request_id,arrival_ms,output_tokens,split,prompt_tokens\nx,233.5,6,v,642\n", [233.5], [642]),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.052,3180,8\n", [52], [3180]),
        (OWN + "0.052,3180,8\n", [52], [3180]),
        (MOONCAKE % (0, 600, [0, 1]) + MOONCAKE % (3000, 512, [0]), [0, 3000], [600, 512]),
        (BAILIAN % (1, -1, 61.114, [5, 6]) + BAILIAN % (2, 1, 62.5, [5, 7]), [61_114, 62_500], [20, 20]),
        (VLLM % (2358, 1787267980.5) + VLLM % (10, 1787267981.75), [0, 1250], [2358, 10]),
        (LMCACHE + "m,a,0,1760995776640783,4014,820,0\nm,a,1,1760995777640783,8,8,4\n", [0, 1000], [1004, 2]),
    ],
    ids=["azure", "burstgpt", "aibrix", "fissionspec", "vidur", "squall", "mooncake", "bailian", "vllm", "lmcache"],
)
def test_a_format_is_told_from_the_columns_and_so_is_its_clock(
    trace: Path, text: str, times_ms: list[float], prompts: list[int]
) -> None:
    trace.write_text(text)
    read = read_trace(trace)
    assert read.arrived_at is not None
    assert [time / 1e6 for time in read.arrived_at] == times_ms
    assert read.num_prompt_tokens == prompts


def test_our_own_format_is_the_same_as_csv_json_lines_and_parquet(tmp_path: Path) -> None:
    csv_text = (
        "arrived_at_s,num_prompt_tokens,num_output_tokens,session,block_hashes,block_size\n0.5,20,5,x,7 8,16\n1.5,16,6,,,16\n"
    )
    (tmp_path / "a.csv").write_text(csv_text)
    rows: list[dict[str, object]] = [
        {
            "arrived_at_s": 0.5,
            "num_prompt_tokens": 20,
            "num_output_tokens": 5,
            "session": "x",
            "block_hashes": [7, 8],
            "block_size": 16,
        },
        {
            "arrived_at_s": 1.5,
            "num_prompt_tokens": 16,
            "num_output_tokens": 6,
            "session": None,
            "block_hashes": None,
            "block_size": 16,
        },
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    polars.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    traces = [read_trace(tmp_path / f"a.{kind}") for kind in ("csv", "jsonl", "parquet")]
    assert traces[0] == traces[1] == traces[2]
    assert (traces[0].blocks, traces[0].block_size, traces[0].turns.sessions) == ([[7, 8], []], 16, [1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOONCAKE % (0, 600, [0]), "line 1: hash_ids names 1 blocks; a prompt of 600 tokens has 2 of 512"),
        (MOONCAKE % (0, 512, [0]) + MOONCAKE % (0, 100, [0, 1, 2]), "line 2: hash_ids names 3 blocks"),
        (MOONCAKE % (0, 512, '["a"]'), r"line 1: hash_ids is .*; it must be a list of whole numbers"),
        (MOONCAKE % (0, 512, 3), "line 1: hash_ids is '3'; it must be a list"),
        (MOONCAKE % (0.25, 512, [0]), "line 1: timestamp is 0.25; it must be a whole number of ms"),
        (MOONCAKE % ("NaN", 512, [0]), "line 1: timestamp is nan"),
        (MOONCAKE % ("Infinity", 512, [0]), "line 1: timestamp is inf"),
        (MOONCAKE % (-1, 512, [0]), "line 1: timestamp is -1"),
        (MOONCAKE % ("null", 512, [0]), "line 1: timestamp is None"),
        (MOONCAKE % ("true", 512, [0]), "line 1: timestamp is True"),
        (MOONCAKE % (0, '"x"', [0]), "line 1: input_length is 'x'; it must be a whole number of at least 1"),
        (MOONCAKE % (0, 0, []), "line 1: input_length is 0"),
        (MOONCAKE % (0, 5, [0]) + "[1, 2]\n", "line 2: is not an object; write one object a line"),
        (MOONCAKE % (0, 5, [0]) + "{oops}\n" + MOONCAKE % (0, 5, [0]), r"line 2: is not JSON \([^;]*\)$"),
        (MOONCAKE % (0, 5, [0]) + '{"timestamp": 10, "input_le', r"line 2: is not JSON \(.*\); the file may be cut off"),
        (MOONCAKE % (0, 5, [0]) + '{"timestamp": 10, "output_length": 5}\n', "line 2: has no input_length"),
        (VLLM % (5, 1787267980.5) + VLLM % (5, 12.5), "line 2: arrival time counts from the start, those above from 1970"),
        (BURST + "5,ChatGPT,472\n", "line 2: has 3 of 6 columns; the file may be cut off"),
        (OWN + "0,1,000,5\n", "line 2: has 4 columns, and the header 3; quote what has a comma in it"),
        (OWN.replace(",", ";") + "0;10;5\n", "line 1: has ';' between its columns; separate them by commas"),
        (OWN.replace(",", "\t") + "0\t10\t5\n", r"line 1: has '\\t' between its columns; separate them by commas"),
        (OWN.strip() + ",num_output_tokens\n0,10,5,6\n", "has several columns num_output_tokens; leave one of them"),
        (BURST + "5,ChatGPT,many,18,490,x\n", "line 2: Request tokens is 'many'; it must be a whole number of at least 0"),
        (LMCACHE + "m,a,0,1760995776640783,4014,820,x\n", "line 2: common_prefix_chars_with_previous_turn is 'x'"),
        (
            '{"arrived_at_s": 0, "num_prompt_tokens": 5, "num_output_tokens": 5, "block_hashes": [1]}\n',
            "block_hashes needs a column",
        ),
    ],
)
def test_bad_rows_of_every_kind_are_named(trace: Path, text: str, message: str) -> None:
    trace.write_text(text)
    with pytest.raises(TraceError, match=rf"trace.csv:? {message}") as caught:
        read_trace(trace)
    assert "\n" not in str(caught.value)


def test_what_a_user_says_of_units_and_blocks_goes_before_what_the_format_says(trace: Path) -> None:
    trace.write_text(MOONCAKE % (0.25, 100, [1, 2]) + MOONCAKE % (1, 64, [1]))
    read = read_trace(trace, time_unit="s", block_size=64)
    assert read.arrived_at == [SECOND // 4, SECOND]
    assert (read.blocks, read.block_size) == ([[1, 2], [1]], 64)


def test_times_that_look_like_another_unit_are_questioned(trace: Path) -> None:
    for unit, said in ((1, "12 requests within 0.009 s"), (1_000_000_000, "12 requests within 9e+06 s")):
        trace.write_text("".join(MOONCAKE % (n // 3 * 3 * unit, 5, []) for n in range(12)))
        assert read_trace(trace).notes == (f"{trace}: {said}; if that is wrong, set workload.time_unit",)
    trace.write_text("".join(MOONCAKE % (3000 * (n // 6), 5, []) for n in range(12)))
    assert read_trace(trace).notes == ()


def test_empty_prompts_count_as_one_token_where_they_are_known_to_occur(trace: Path) -> None:
    trace.write_text(BURST + "5,ChatGPT,472,0,472,x\n7,ChatGPT,0,20,20,x\n9,GPT-4,0,0,0,x\n")
    read = read_trace(trace)
    assert (read.num_prompt_tokens, read.num_output_tokens) == ([472, 1, 1], [1, 20, 1])
    assert [note.partition(": ")[2] for note in read.notes] == [
        "2 rows of 0 prompt tokens count as 1",
        "2 rows of 0 output tokens count as 1",
    ]


def test_a_published_name_on_a_small_file_is_questioned(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(BURST + "5,ChatGPT,472,18,490,x\n")
    assert "has 1 rows; the published BurstGPT files have over a million" in read_trace(path).notes[0]


def test_other_formats_may_come_as_parquet_too(tmp_path: Path) -> None:
    start = datetime(2024, 5, 10, 0, 0, 0, 9930, tzinfo=UTC)
    times = [start, start + timedelta(seconds=1.5)]
    table = {"TIMESTAMP": times, "ContextTokens": [5, 6], "GeneratedTokens": [7, 8]}
    polars.DataFrame(table).write_parquet(tmp_path / "azure.parquet")
    assert read_trace(tmp_path / "azure.parquet").arrived_at == [0, 3 * SECOND // 2]
    table["ContextTokens"] = [5, -6]
    polars.DataFrame(table).write_parquet(tmp_path / "azure.parquet")
    with pytest.raises(TraceError, match=r"azure.parquet row 2: ContextTokens is -6; it must be a whole number of at least 1"):
        read_trace(tmp_path / "azure.parquet")


def test_a_broken_parquet_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(TraceError, match=r"a.parquet: is not a readable Parquet file") as caught:
        read_trace(tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)


def test_unsorted_rows_take_their_blocks_and_sessions_along(trace: Path) -> None:
    trace.write_text(BAILIAN % (2, 1, 9, [5, 7]) + BAILIAN % (1, -1, 4, [5, 6]) + BAILIAN % (3, 2, 10, [5, 8]))
    read = read_trace(trace)
    assert read.blocks == [[5, 6], [5, 7], [5, 8]]
    assert (read.turns.sessions, read.turns.parents) == ([1, 1, 1], [-1, 0, 1])


def test_a_format_that_is_asked_for_is_insisted_on(trace: Path) -> None:
    trace.write_text(OWN + "0,1,1\n")
    with pytest.raises(
        TraceError,
        match=r"no column TIMESTAMP and no ContextTokens and no GeneratedTokens \(azure format\); the columns are arrived_at_s",
    ):
        read_trace(trace, "azure")


TRACES = [
    "azure2023_code.csv",
    "azure2023_conv.csv",
    "vidur_splitwise_code.csv",
    "vidur_splitwise_conv.csv",
    "vidur_arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
    "vattention_arxiv_long_online.csv",
    "mooncake_conversation_trace.jsonl",
    "mooncake_synthetic_trace.jsonl",
    "llmservingsim_measured/RTX4090_Llama-3.1-8B_requests.jsonl",
    "fissionspec_azure2024_code_1024.csv",
]


def published(shared: Path) -> dict[str, dict[str, str]]:
    rows = csv.DictReader((shared / "data" / "traces" / "STATS.csv").read_text().splitlines())
    return {row["file"]: row for row in rows}


@pytest.mark.shared
def test_every_trace_with_published_statistics_is_tested(shared: Path) -> None:
    assert set(published(shared)) == set(TRACES)


@pytest.mark.shared
@pytest.mark.parametrize("name", TRACES)
def test_lengths_of_real_traces_match_the_published_statistics(shared: Path, name: str) -> None:
    stats = published(shared)[name]
    trace = read_trace(shared / "data" / "traces" / name)
    assert trace.notes == ()
    assert len(trace.num_prompt_tokens) == int(stats["rows"])
    for what, lengths in (("prompt", np.array(trace.num_prompt_tokens)), ("output", np.array(trace.num_output_tokens))):
        assert lengths.mean() == pytest.approx(float(stats[f"{what}_mean"]), abs=0.051)
        assert (lengths.min(), lengths.max()) == (int(stats[f"{what}_min"]), int(stats[f"{what}_max"]))
        for percent in (50, 90, 99):
            assert np.percentile(lengths, percent) == pytest.approx(float(stats[f"{what}_p{percent}"]), abs=0.051)
        assert stats[f"{what}_zero"] == "0"


@pytest.mark.shared
@pytest.mark.parametrize("name", TRACES)
def test_arrivals_of_real_traces_match_the_published_statistics(shared: Path, name: str) -> None:
    stats = published(shared)[name]
    arrived_at = read_trace(shared / "data" / "traces" / name).arrived_at
    if not stats["duration_s"]:
        assert arrived_at is None
        return
    assert arrived_at is not None
    times = np.array(arrived_at) / SECOND - arrived_at[0] / SECOND
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(float(stats["duration_s"]), abs=0.051)
    assert len(times) / times[-1] == pytest.approx(float(stats["mean_rps"]), abs=0.0006)
    assert int((gaps == 0).sum()) == int(stats["dup_ts"])
    assert gaps.std() / gaps.mean() == pytest.approx(float(stats["interarrival_cv"]), abs=0.0051)
    for seconds in (1, 10, 60):
        counts = np.bincount((times // seconds).astype(int))
        assert counts.max() / counts.mean() == pytest.approx(float(stats[f"peak_to_mean_{seconds}s"]), abs=0.0051)
    assert int((np.bincount((times // 60).astype(int)) == 0).sum()) == int(stats["empty_60s_windows"])


@pytest.mark.shared
@pytest.mark.parametrize(("name", "share"), [("mooncake_conversation", 0.366), ("mooncake_synthetic", 0.640)])
def test_blocks_of_mooncake_are_hit_as_often_as_is_published(shared: Path, name: str, share: float) -> None:
    trace = read_trace(shared / "data" / "traces" / f"{name}_trace.jsonl")
    seen: set[int] = set()
    hits = 0
    for blocks in trace.blocks:
        hits += len(seen.intersection(blocks))
        seen.update(blocks)
    assert hits / sum(map(len, trace.blocks)) == pytest.approx(share, abs=0.0005)
    assert trace.block_size == 512


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
        ("t04_zero_tokens.csv", 3),
        ("t06_float_token_counts.csv", 1),
        ("t07_no_timestamp_column.csv", 1),
        ("t11_huge_lengths.jsonl", 3),
    ],
)
def test_odd_files_that_hold_requests_are_read(shared: Path, name: str, rows: int) -> None:
    assert len(read_trace(shared / "data" / "oddities" / "fixtures" / name).num_prompt_tokens) == rows


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t05_negative_nan_inf.csv", "line 2: arrived_at is '-1.0'"),
        ("t08_seconds_in_ms_format.jsonl", "line 2: timestamp is 0.2; it must be a whole number of ms"),
        ("t10_hash_ids_len_mismatch.jsonl", "line 1: hash_ids names 1 blocks; a prompt of 600 tokens has 2 of 512"),
        ("t13_truncated_last_line.jsonl", r"line 2: is not JSON \(.*\); the file may be cut off"),
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
