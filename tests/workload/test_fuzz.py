"""Whatever a trace file holds, it is read, or refused in one line that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.errors import ConfigError, TraceError
from squall.workload.build import build
from squall.workload.formats import FORMATS, Format
from squall.workload.servegen import draw_client
from squall.workload.spec import TraceWorkload
from squall.workload.traces import Trace, read_trace

ODD: list[Any] = [
    None, True, -1, 0, 1, 7.5, 7.0, 1e18, float("nan"), float("inf"), 1 << 70, 1787267980.08,
    "", " ", "x", "-1", "nan", "7564.0", "1e400", "9" * 30, "1 2", "\n",
    [], [1], [1, 2], ["a"], [None], {},
    "2024-05-10 00:00:00.009930+00:00", "2024-13-10 00:00:00", "2024-05-10T00:00:00Z",
]  # fmt: skip
SAMPLES = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    "arrived_at_s,num_prompt_tokens,num_output_tokens,session,block_hashes,block_size\n0.5,20,5,x,7 8,16\n1.5,16,6,,,16\n",
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 9, "input_length": 5, "output_length": 5}\n',
]
RATES = [
    "0,1,1,Gamma,1,1",
    "600,2,1,Weibull,0.5,1",
    "x",
    "",
    "1200,0,,,0,0",
    "9,9",
    "0,inf,1,Gamma,1,1",
    "5,1,1,Gamma,1e-9,1",
    "5,0.002,1,Weibull,0.005,1",
]


def read_or_refused(path: Path, read: Callable[[Path], Trace] = read_trace) -> Trace | None:
    try:
        trace = read(path)
    except TraceError as error:
        said = str(error)
    else:
        return sound(trace)
    assert said.startswith(str(path.parent))
    assert "\n" not in said
    return None


def sound(trace: Trace) -> Trace:
    assert min(trace.num_prompt_tokens) >= 1
    assert min(trace.num_output_tokens) >= 1
    if trace.arrived_at is not None:
        assert trace.arrived_at == sorted(trace.arrived_at)
        assert trace.arrived_at[0] >= 0
    return trace


@settings(deadline=None)  # a busy machine is no failure
@given(form=st.sampled_from(FORMATS), kind=st.sampled_from(["csv", "jsonl", "parquet"]), data=st.data())
def test_any_values_in_the_columns_of_any_format(form: Format, kind: str, data: st.DataObject) -> None:
    names = [form.arrival[0], form.prompt[0], form.output[0], *form.optional]
    good = {
        form.arrival[0]: "2024-05-10 00:00:01" if not form.unit else 5,
        form.prompt[0]: 9,
        form.output[0]: 9,
        "block_size": 16,
    }
    values = st.one_of(st.just("good"), st.sampled_from(ODD))
    rows = [
        {name: good.get(name) if (value := data.draw(values)) == "good" else value for name in names}
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"trace.{kind}"
        if kind == "jsonl":
            path.write_text("\n".join(json.dumps(row) for row in rows))
        elif kind == "csv":
            path.write_text("\n".join([",".join(names), *(",".join(map(str, row.values())) for row in rows)]))
        else:
            try:
                polars.DataFrame(rows, strict=False).write_parquet(path)
            except Exception:  # no table can hold such a mixture
                return
        read_or_refused(path)
        try:
            build(TraceWorkload(path.name, turns="wait", max_requests=3), 0, Path(folder), honours_after=True)
        except ConfigError as error:
            said = str(error)
        else:
            said = ""
        assert "\n" not in said


@settings(deadline=None)
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_any_damage_to_a_file(sample: str, data: st.DataObject) -> None:
    raw = bytearray(sample.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw)))
        raw[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=6))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(bytes(raw))
        read_or_refused(path)


@settings(deadline=None)
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_a_file_that_is_cut_off_anywhere(sample: str, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_text(sample[: data.draw(st.integers(0, len(sample)))])
        read_or_refused(path)


@settings(deadline=None)
@given(
    rates=st.lists(st.sampled_from(RATES)),
    dataset=st.sampled_from(ODD)
    | st.dictionaries(st.sampled_from(["0", "600", "x"]), st.sampled_from(ODD) | st.fixed_dictionaries({
        "input_tokens": st.sampled_from([*ODD, "{5: 1.0}", "{}", "{5: 'x'}", "{5: -1.0}", "{'a': 1}", "[5]", "open('x')"]),
        "output_tokens": st.sampled_from(["{5: 1.0}", "{}"]),
    })),
)  # fmt: skip
def test_any_client_of_servegen(rates: list[str], dataset: Any) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c-trace.csv"
        path.write_text("\n".join(rates))
        (Path(folder) / "c-dataset.json").write_text(json.dumps(dataset))
        read_or_refused(path, lambda path: draw_client(path, 0, 0.0, None, 20))
