import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from squall.errors import TraceError
from squall.workload.build import build
from squall.workload.limits import MOST_TOKENS
from squall.workload.servegen import draw_client, is_client
from squall.workload.spec import TraceWorkload

SECOND = 1_000_000_000
RATES = "0,0.5,1.2,Gamma,0.7,2.8\n600,0,0,,0,0\n1200,2.0,3.0,Weibull,0.4,0.15\n1800,1.0,1.0,Exponential,0,0\n"
DATASET = {
    "0": {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{7: 1.0}"},
    "21600": {"input_tokens": "{}", "output_tokens": "{}"},
}


def client(folder: Path, rates: str = RATES, dataset: object = DATASET) -> Path:
    (folder / "c-trace.csv").write_text(rates)
    (folder / "c-dataset.json").write_text(json.dumps(dataset))
    return folder / "c-trace.csv"


def test_every_window_has_the_requests_that_its_rate_says_and_none_at_zero(tmp_path: Path) -> None:
    trace = draw_client(client(tmp_path), 0, 0.0, None, None)
    assert trace.arrived_at is not None
    assert trace.arrived_at == sorted(trace.arrived_at)
    assert np.bincount(np.array(trace.arrived_at) // (600 * SECOND)).tolist() == [300, 0, 1200, 600]
    assert trace.notes == (f"{tmp_path / 'c-trace.csv'}: these requests are drawn from a client's statistics, none was recorded",)


def test_gaps_are_of_the_recorded_family(tmp_path: Path) -> None:
    path = client(tmp_path, "0,100,3,Weibull,0.4,0.003\n600,100,0.5,Gamma,4,0.0025\n1200,100,1,Exponential,0,0\n")
    for start, cv in ((0.0, 3.14), (600.0, 0.5), (1200.0, 1.0)):
        times = draw_client(path, 0, start, 600.0, None).arrived_at
        gaps = np.diff(np.array(times))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_lengths_are_of_the_histogram(tmp_path: Path) -> None:
    trace = draw_client(client(tmp_path), 0, 0.0, None, None)
    assert np.mean(np.array(trace.num_prompt_tokens) == 200) == pytest.approx(0.75, abs=0.03)
    assert set(trace.num_prompt_tokens) == {100, 200}
    assert set(trace.num_output_tokens) == {7}


def test_where_a_stretch_has_no_histogram_the_one_before_counts(tmp_path: Path) -> None:
    path = client(tmp_path, "21600,1,1,Gamma,1,1\n")
    assert set(draw_client(path, 0, 0.0, None, None).num_output_tokens) == {7}


def test_where_reading_begins_changes_no_window(tmp_path: Path) -> None:
    path = client(tmp_path)
    whole, part = draw_client(path, 0, 0.0, None, None), draw_client(path, 0, 1500.0, 200.0, None)
    assert whole.arrived_at is not None
    kept = [row for row, time in enumerate(whole.arrived_at) if 1500 * SECOND <= time < 1700 * SECOND]
    assert part.arrived_at == [whole.arrived_at[row] for row in kept]
    assert part.num_prompt_tokens == [whole.num_prompt_tokens[row] for row in kept]
    assert draw_client(path, 0, 0.0, None, 5).arrived_at == whole.arrived_at[:5]


def test_multimodal_prompts_count_what_their_media_become(tmp_path: Path) -> None:
    columns = {
        "text_tokens": "{10: 1.0}", "image_tokens": "{300: 1.0}", "image_count": "{2: 1.0}",
        "audio_tokens": "{0: 1.0}", "audio_count": "{0: 1.0}", "output_tokens": "{5: 1.0}",
    }  # fmt: skip
    assert set(draw_client(client(tmp_path, dataset={"0": columns}), 0, 0.0, None, 50).num_prompt_tokens) == {610}


def test_a_packed_dataset_and_one_of_real_json_are_read_too(tmp_path: Path) -> None:
    plain = draw_client(client(tmp_path), 0, 0.0, None, 50)
    real = {"0": {"input_tokens": {"100": 0.25, "200": 0.75}, "output_tokens": {"7": 1.0}}}
    path = client(tmp_path, dataset=real)
    assert draw_client(path, 0, 0.0, None, 50) == plain
    (tmp_path / "c-dataset.json").unlink()
    (tmp_path / "c-dataset.json.gz").write_bytes(gzip.compress(json.dumps(DATASET).encode()))
    assert draw_client(path, 0, 0.0, None, 50) == plain


def test_a_trace_workload_recognises_a_client_and_cuts_and_scales_it(tmp_path: Path) -> None:
    client(tmp_path)
    requests = build(TraceWorkload("c-trace.csv", start_s=1200.0, duration_s=600.0, rate_scale=2.0), 0, tmp_path)
    assert len(requests) == 1200
    assert requests[-1].arrived_at <= 300 * SECOND
    assert build(TraceWorkload("c-trace.csv", format="servegen", max_requests=7), 0, tmp_path)[-1].id == 6


def test_other_files_are_no_clients(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("arrived_at_s,num_prompt_tokens,num_output_tokens\n0,5,5\n")
    assert not is_client(tmp_path / "a.csv")
    assert not is_client(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ("", r"trace.csv: is empty"),
        ("0,1,1,Gamma,1\n", r"trace.csv line 1: has 5 of 6 columns .*; the file may be cut off"),
        ("0,nan,1,Gamma,1,1\n", r"trace.csv line 1: rate is 'nan'; it must be a number, 0 or more"),
        ("0,1,1,Gamma,1,1\n600,-1,1,Gamma,1,1\n", r"trace.csv line 2: rate is '-1'"),
        ("0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", r"trace.csv line 2: starts at 0 s, which is not after 0 s"),
        ("0,1,1,Pareto,1,1\n", r"trace.csv line 1: the family of the gaps is 'Pareto'"),
        ("0,1,1,Gamma,0,1\n", r"trace.csv line 1: shape is '0'; that of a Gamma distribution must be at least 0.005"),
        ("0,99999,1,Gamma,1,1\n", r"stands for 59,999,400 requests; say which with workload.duration_s or max_requests"),
        ("0,0,0,,0,0\n", r"no request in the window"),
    ],
)
def test_bad_rates_are_one_line(tmp_path: Path, rates: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        draw_client(client(tmp_path, rates), 0, 0.0, None, None)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({}, r"c-dataset.json: is empty"),
        ([1], r"c-dataset.json: is not a ServeGen dataset"),
        ({"0": {"input_tokens": "{1: ", "output_tokens": "{7: 1.0}"}}, r"input_tokens at 0 is '\{1: '; it must be a dictionary"),
        ({"0": {"input_tokens": "{-1: 1.0}", "output_tokens": "{7: 1.0}"}}, r"input_tokens at 0 is '\{-1: 1.0\}'"),
        ({"0": {"input_tokens": "{5.5: 1.0}", "output_tokens": "{7: 1.0}"}}, r"input_tokens at 0 is '\{5.5: 1.0\}'"),
        ({"0": {"input_tokens": f"{{{10**20}: 1.0}}", "output_tokens": "{7: 1.0}"}}, r"input_tokens at 0 is '\{1000000000"),
        ({"0": {"input_tokens": "-" * 100_000 + "1", "output_tokens": "{7: 1.0}"}}, r"input_tokens at 0 is '-----"),
        ({"0": {"input_tokens": "{}", "output_tokens": "{7: 1.0}"}}, r"c-dataset.json: has no input_tokens at any time"),
    ],
)
def test_a_bad_dataset_is_one_line(tmp_path: Path, dataset: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        draw_client(client(tmp_path, dataset=dataset), 0, 0.0, None, None)


@pytest.mark.parametrize("name", ["c-trace.csv", "c-dataset.json"])
def test_a_pointer_in_place_of_either_file_is_recognised(tmp_path: Path, name: str) -> None:
    path = client(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a4d068a7\nsize 51429517\n")
    with pytest.raises(TraceError, match=rf"{name}: is a git-lfs pointer"):
        draw_client(path, 0, 0.0, None, None)


def test_more_media_than_a_prompt_can_hold_are_as_many_as_it_can(tmp_path: Path) -> None:
    most = str(MOST_TOKENS)
    columns = {"text_tokens": "{9: 1.0}", "image_tokens": f"{{{most}: 1.0}}", "image_count": f"{{{most}: 1.0}}"}
    trace = draw_client(client(tmp_path, dataset={"0": {**columns, "output_tokens": "{7: 1.0}"}}), 0, 0.0, None, 3)
    assert trace.num_prompt_tokens == [MOST_TOKENS] * 3


def test_a_missing_dataset_is_named(tmp_path: Path) -> None:
    client(tmp_path)
    (tmp_path / "c-dataset.json").unlink()
    with pytest.raises(TraceError, match=r"c-dataset.json, which tells how long this client's requests are, is not beside it"):
        draw_client(tmp_path / "c-trace.csv", 0, 0.0, None, None)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["m-mid_chunk-60", "m-small_chunk-27", "mm-image_chunk-12"])
def test_real_clients_come_at_their_recorded_rates(shared: Path, name: str) -> None:
    path = shared / "data" / "traces" / "servegen" / f"{name}-trace.csv"
    rates = [float(line.split(",")[1]) for line in path.read_text().splitlines()[:10]]
    times = draw_client(path, 0, 0.0, 6000.0, None).arrived_at
    counts = np.bincount(np.array(times) // (600 * SECOND), minlength=10)
    assert counts.tolist() == [round(rate * 600) for rate in rates]
