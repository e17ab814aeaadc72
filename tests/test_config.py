"""The configuration tree: what a file, an override or a mistake in either comes to."""

import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall import config
from squall.config import Config, dumps, load
from squall.errors import ConfigError
from squall.fleet_tables import Fleet
from squall.policies.route import LeastLoaded, RoundRobin
from squall.workload.spec import PoissonArrivals, SyntheticWorkload, TraceWorkload


class AlwaysFirst(msgspec.Struct, frozen=True):
    """A route policy of a user's own."""

    bias: int = 0


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


SYNTHETIC = """
[workload]
kind = "synthetic"
arrivals = { kind = "poisson", rate_rps = 2.0 }
prompt = { kind = "fixed", tokens = 8 }
output = { kind = "uniform", low = 1, high = 4 }
num_requests = 10
"""


def test_no_file_means_all_defaults() -> None:
    assert load(None) == Config()


def test_a_file_is_read_and_an_override_wins(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, SYNTHETIC + "[fleet]\nreplicas = 2\n"), ["fleet.replicas=4", "model.name=llama-3-8b"])
    assert loaded.fleet.replicas == 4
    assert loaded.model.name == "llama-3-8b"
    assert isinstance(loaded.workload, SyntheticWorkload)
    assert loaded.workload.arrivals == PoissonArrivals(2.0)


def test_an_override_that_changes_the_kind_drops_the_old_kinds_keys() -> None:
    assert load(None, ["route.kind=least_loaded", "route.output_tokens=7"]).route == LeastLoaded(7)
    assert load(None, ["route.output_tokens=7", "route.kind=round_robin"]).route == RoundRobin()


def test_an_override_of_the_fleets_mode_drops_the_old_modes_roles(tmp_path: Path) -> None:
    (tmp_path / "apart.toml").write_text('[fleet]\nmode = "disaggregated"\nprefill = {min = 1, max = 3}\ndecode = 2\n')
    together = load(tmp_path / "apart.toml", ["fleet.replicas=3", "fleet.mode=colocated"]).fleet
    assert (together.mode, together.replicas, together.prefill) == ("colocated", 3, 1)
    (tmp_path / "together.toml").write_text("[fleet]\nreplicas = {min = 1, max = 4}\n")
    apart = load(tmp_path / "together.toml", ["fleet={mode='disaggregated', decode=2}"]).fleet
    assert (apart.mode, apart.replicas, apart.prefill, apart.decode) == ("disaggregated", 1, 1, 2)
    for file, overrides in (
        ("apart.toml", ["fleet.mode=colocated", "fleet.prefill=2"]),  # these words contradict each other
        ("apart.toml", ["fleet.replicas=2"]),
        ("together.toml", ["fleet.mode=disaggregated", "fleet.replicas=2"]),
    ):
        with pytest.raises(ConfigError, match=r"--set: fleet.(prefill|replicas) means nothing where fleet.mode = "):
            load(tmp_path / file, overrides)


def test_the_resolved_configuration_loads_to_the_same(tmp_path: Path) -> None:
    once = load(write(tmp_path, SYNTHETIC))
    assert load(write(tmp_path, dumps(once))) == once


@given(replicas=st.integers(1, 10**5), share=st.floats(0.01, 1.0), name=st.text(min_size=1, max_size=20))
def test_any_values_survive_the_round_trip(replicas: int, share: float, name: str) -> None:
    tree = Config(
        fleet=Fleet(replicas=replicas),
        replica=config.ReplicaSpec(gpu_memory_utilization=share),
        model=config.Model(served_as=(name,)),
    )
    assert msgspec.convert(tomllib.loads(dumps(tree)), Config) == tree


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, '[workload]\nkind = "trace"\npath = "a.csv"\n[model]\nname = "./model"\n'))
    assert isinstance(loaded.workload, TraceWorkload)
    assert loaded.workload.path == str(tmp_path / "a.csv")
    assert loaded.model.name == str(tmp_path / "model")


def test_a_users_own_policy_is_loaded_and_written_back(tmp_path: Path) -> None:
    own = f"{__name__}:AlwaysFirst"
    loaded = load(None, [f'route={{ kind = "{own}", bias = 3 }}'])
    route: object = loaded.route
    assert route == AlwaysFirst(3)
    assert load(write(tmp_path, dumps(loaded))) == loaded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnme = 'x'", "[model] has no key 'nme'; did you mean 'name'?"),
        ("[modle]\n", "there is no table 'modle'; did you mean 'model'?"),
        ("[replica]\ntp = 0", "replica.tp = 0: expected `int` >= 1"),
        ("[serve]\nport = 'x'", "serve.port = 'x': expected `int`, got `str`"),
        ("[serve]\nengine = 'x'", "serve.engine = 'x': unknown value 'x'; one of torch, emulated"),
        ("[route]\nkind = 'least_loded'", "route.kind = 'least_loded': unknown value 'least_loded'; one of round_robin, least"),
        ("[workload]\nkind = 'trace'", "[workload] needs the key 'path'"),
        (SYNTHETIC.replace("rate_rps", "rate"), "[workload.arrivals] has no key 'rate'; did you mean 'rate_rps'?"),
        ("[slo]\nattainment = 1.5", "slo.attainment = 1.5: expected `float` <= 1.0"),
        ("[[[", "not valid TOML: "),
        ("[route]\nkind = 'nowhere:Policy'", "route.kind = 'nowhere:Policy' cannot be imported: No module named 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file_the_key_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slo.ttft_s=inf", "slo.ttft_s = inf: expected a finite number"),
        ("serve.time_dilation=nan", "serve.time_dilation = nan: expected a finite number"),
        (f"run.seed={'9' * 5000}", "expected `int`, got `str`"),
        ("fleet.replicas=9223372036854775808", "fleet.replicas is larger than any number of 64 bits"),
        ("slo.ttft_s=1e300", "slo.ttft_s = 1e+300: expected at most 9000000000 seconds"),
        ("startup.process_s=9000000001", "expected at most 9000000000 seconds"),
        ("faults=[{at_s=1e10, kind='node', which=0}]", "faults.at_s = 10000000000.0: expected at most 9000000000 seconds"),
        ("cluster.nic_gbps=1e300", "cluster.nic_gbps = 1e+300: expected at most 1000000000000000"),
        ("cluster.nodes=1000000000000", "cluster.nodes = 1000000000000: expected `int` <= 100000"),
        ("cluster.gpus_per_node=1000000000000", "cluster.gpus_per_node = 1000000000000: expected `int` <= 1024"),
        ("cluster.nic_gbps=1e-10", "cluster.nic_gbps = 1e-10: expected 0, or at least 0.000000001"),
        ("latency.overhead_s=61", "latency.overhead_s = 61: expected `float` <= 60"),
        ("latency.launch_s=1e9", "latency.launch_s = 1000000000.0: expected `float` <= 60"),
        ("run.seed=9223372036854775808", "run.seed is larger than any number of 64 bits"),
        ("fleet.up_interval_s=1e-6", "fleet.up_interval_s = 1e-06: expected `float` >= 0.001"),
        (
            "faults=[{at_s=1, kind='comet', which=0}]",
            "faults[0].kind = 'comet': unknown value 'comet'; one of replica, node, link, slow",
        ),
        ("faults=[{at_s=1, kind='node', which=0, factor=2}]", "faults[0].factor = 2: expected `float` < 1.0"),
        (
            "faults=[{at_s=1, kind='node', which=0}, {at_s=1, kind='link', which=1}]",
            "faults[1].which = 1: there is no such node; they are",
        ),
        (
            "faults=[{at_s=1, kind='slow', which=1}]",
            "faults[0].which = 1: there is no such replica; they are counted from 0 to 0",
        ),
        (
            "faults=[{at_s=1, kind='slow', which=0, factor=0.8}]",
            "faults[0].factor = 0.8 changes nothing: steps take a whole number of times as long; choose 0.5, 0.33 or less",
        ),
        ("faults=[{at_s=1, kind='slow', which=0, factor=0}]", "faults[0].factor = 0.0: expected at least 0.0001; a replica that"),
        (
            "startup.cold=['jti']",
            "startup.cold[0] = 'jti': unknown value 'jti'; one of process, context, capture, jit",
        ),
        ("startup.cold='jit'", "startup.cold = 'jit': expected `bool | array`, got `str`; one of process, context, capture, jit"),
        ("startup.cold_jit_s=-1", "startup.cold_jit_s = -1: expected `float` >= 0.0"),
        ("startup.warmup_s=1", "[startup] has no key 'warmup_s'; "),
        ("hazards.slow_factor=0.7", "hazards.slow_factor = 0.7 changes nothing: steps take a whole number of times as long"),
        ("hazards.link_per_hour=-1", "hazards.link_per_hour = -1: expected `float` >= 0.0"),
        ("hazards.link_lost_per_hour=4000", "hazards.link_lost_per_hour = 4000: expected `float` <= 3600.0"),
        ("hazards.link_s=0", "hazards.link_s = 0: expected `float` > 0.0"),
        ("hazards.link_factor=1", "hazards.link_factor = 1: expected `float` < 1.0"),
        ("hazards.straggler_per_hour=1", "[hazards] has no key 'straggler_per_hour'; did you mean"),
        ("fleet.pools=[{replicas=0}]", "fleet.pools[0].replicas = 0: expected `int` >= 1"),
        ("fleet.pools=[{replica=1}]", "[fleet.pools[0]] has no key 'replica'; did you mean 'replicas'?"),
        ("fleet.pools=[{batching={kind='foo'}}]", "fleet.pools[0].batching.kind = 'foo': unknown value 'foo'; one of vllm,"),
        ('latency.path="a\\u0000b"', "contains a null character"),
        ('serve.api_keys=["a", "\\u0000"]', "serve.api_keys = '\\x00': contains a null character"),
        ("model.name=~nobody-of-this-name/model", None),
        ("latency.path=~nobody-of-this-name/profile.json", None),
        (f"model.name=a/{'x' * 300}", None),
        ("route.kind=..:Policy", "route.kind = '..:Policy' cannot be imported: TypeError"),
        ("route.kind=:", "cannot be imported: ValueError: Empty module name"),
        ("route.kind=json:dumps", "route.kind = 'json:dumps' is no msgspec.Struct, as a policy must be"),
        ("route.kind=builtins:dict", "is no msgspec.Struct"),
        (f"serve.engine={'x' * 5000}", "one of torch, emulated"),
        (f"fleet.replicas={'x' * 5000}", "expected `int` or a table {min, max}, got `str`"),
        (f"run.seed={'[' * 5000}{']' * 5000}", "expected `int`, got `str`"),
    ],
)
def test_a_value_that_nobody_means_is_one_short_line_or_just_a_name(override: str, message: str | None) -> None:
    if message is None:
        load(None, [override])
        return
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_nested_beyond_all_measure_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: nested too deeply"):
        load(write(tmp_path, f"a = {'[' * 5000}{']' * 5000}"))


def test_a_policy_whose_module_is_broken_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError: division by zero"):
        load(None, ["scale.kind=broken_policy:Policy"])


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such configuration file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary.toml: cannot be read as UTF-8 text"):
        load(tmp_path / "binary.toml")


@pytest.mark.parametrize("override", ["fleet", "=3", "a b=1", "fleet..replicas=1"])
def test_an_override_without_a_key_or_a_value_says_what_one_looks_like(override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected key=value, such as fleet\.replicas=4"):
        load(None, [override])


def test_a_mistake_is_blamed_on_the_override_or_on_the_file_that_made_it(tmp_path: Path) -> None:
    good, bad = write(tmp_path, SYNTHETIC), tmp_path / "bad.toml"
    bad.write_text("[fleet]\nreplicas = 0")
    with pytest.raises(ConfigError, match=r"^--set: \[fleet\] has no key 'replcas'"):
        load(good, ["fleet.replcas=2"])
    with pytest.raises(ConfigError, match=r"bad\.toml: fleet\.replicas = 0"):
        load(bad, ["model.name=llama-3-8b"])


def structs_below(annotation: Any) -> set[Any]:
    """All Struct types that the configuration can contain."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        inner = [structs_below(hint) for hint in get_type_hints(annotation, include_extras=True).values()]
        return {annotation}.union(*inner)
    return set[Any]().union(*(structs_below(part) for part in get_args(annotation)))


def test_no_table_swallows_a_key_that_it_does_not_know() -> None:
    lax = [struct for struct in structs_below(Config) if not struct.__struct_config__.forbid_unknown_fields]
    assert lax == []


@pytest.mark.parametrize(("table", "key"), [("batching", "max_num_seqs = 8"), ("route", ""), ("scale", ""), ("load", "")])
def test_a_policy_table_without_a_kind_means_the_default_one(tmp_path: Path, table: str, key: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f"[{table}]\n{key}\n")
    config = load(path)
    assert type(getattr(config, table)) is type(getattr(Config(), table))
    assert config.batching.max_num_seqs == (8 if key else Config().batching.max_num_seqs)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("fleet.replicas=100001", r"fleet.replicas = 100001: expected `int` <= 100000"),
        ("fleet.replicas={min=0, max=900000000000000000}", r"fleet.replicas.max = 900000000000000000: expected `int` <= 100000"),
        (
            "fleet.pools=[{replicas=60000, gpu='a100-80g'}, {replicas=60000}]",
            r"\[fleet\] may grow to 120000 replicas; expected at most 100000",
        ),
        (
            "fleet={mode='disaggregated', prefill=60000, decode=60000}",
            r"\[fleet\] may grow to 120000 replicas; expected at most 100000",
        ),
    ],
)
def test_a_fleet_that_no_gpus_bound_is_bounded_all_the_same(size: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, ["cluster.gpu=cpu", size])
