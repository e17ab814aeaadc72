"""What a served fleet stands on, and where replicas that are to work while they load are refused."""

import pytest

from squall import config as configuration
from squall.errors import ConfigError
from squall.live.plan import served_plan
from squall.live.served import served_model

LIVE = ("cluster.gpu=h100-sxm", "fleet.replicas={min=1, max=4}", "load={kind='chain', live=true}")
EMULATED = (*LIVE, "serve.engine=emulated", "model.name=llama-3.1-8b", "cluster.nodes=2", "cluster.gpus_per_node=4")


def num_live_layers(*settings: str) -> int:
    config = configuration.load(None, settings)
    return served_plan(config, served_model(config)).live_layers


def test_emulated_replicas_work_while_they_load_where_that_is_asked_for() -> None:
    assert num_live_layers(*EMULATED) == 32
    assert num_live_layers(*EMULATED, "load.live=false") == 0
    assert num_live_layers(*EMULATED, "fleet.replicas=2") == 0


def test_a_fleet_has_as_many_places_as_its_hosts() -> None:
    hosts = ("launcher.kind=hosts", "launcher.hosts=[{hostname='a', devices=[0, 1]}, {hostname='b', devices=[0, 1]}]")
    for settings in ((*EMULATED, *hosts), (*EMULATED, *hosts, "fleet.replicas=1")):
        config = configuration.load(None, settings)
        slots = served_plan(config, served_model(config)).slots
        assert (slots.num, [slots.node(place) for place in range(4)]) == (4, [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [("serve.transport", "nixl", "'tcp'"), ("replica.pp", "2", "1")],
)
def test_real_replicas_that_cannot_are_refused_with_the_key_and_what_would_be_right(key: str, value: str, right: str) -> None:
    config = configuration.load(None, (*EMULATED, "serve.engine=torch", f"{key}={value}"))
    model = served_model(configuration.load(None, EMULATED))
    with pytest.raises(ConfigError, match=rf"^load\.live with {key} = .* with {key} = {right} only, so far; set that") as raised:
        served_plan(config, model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_on_gpus_work_while_they_load(tp: int) -> None:
    settings = (*EMULATED, "serve.engine=torch", "serve.device=cuda", f"replica.tp={tp}")
    model = served_model(configuration.load(None, EMULATED))
    assert served_plan(configuration.load(None, settings), model).live_layers == 32
