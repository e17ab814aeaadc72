"""Whose a price is: the GPU's, whatever it is called."""

from pathlib import Path

import pytest

from squall.errors import ConfigError
from squall.search.prices import named, price_of, refuse_strangers, tried
from squall.search.setting import Workshop
from tests.search.conftest import job, question, tree


@pytest.mark.parametrize("key", ["h100", "h100-sxm", "H100_80G"])
def test_a_price_is_found_by_any_name(key: str) -> None:
    assert named({"a100": 1.0, key: 2.0}, "h100-sxm", "h100-sxm") == 2.0
    search = question(prices={key: {"on_demand": 2.5}}, available={key: 3})
    workshop = Workshop(search)
    assert workshop.setting(job({"cluster.gpu": "h100-80g"})).usd_per_gpu_hour == 2.5
    with pytest.raises(ConfigError, match="4 x h100-sxm are more than can be had"):
        workshop.setting(job({"cluster.gpu": "h100-80g", "fleet.replicas": 4}))


def test_the_configurations_own_name_comes_first() -> None:
    assert named({"h100": 1.0, "h100-sxm": 2.0}, "h100", "h100-sxm") == 1.0
    assert named({"t4": 1.0}, "h100", "h100-sxm") is None


def test_a_price_is_a_name_and_a_number() -> None:
    assert price_of(" h100 =2.5") == ("h100", 2.5)
    for wrong in ("h100", "h100=", "=1", "h100=x", "h100=-1", "h100=inf"):
        with pytest.raises(ConfigError, match="expected GPU=USD"):
            price_of(wrong)


def test_gpus_of_ones_own_have_prices(tmp_path: Path) -> None:
    card = tmp_path / "mine.toml"
    card.write_text('base = "h100-sxm"\nname = "mine"\n')
    search = question(space={"cluster.gpu": [str(card), "a100"]}, prices={"mine": {"on_demand": 1.5}})
    gpus = tried(search, tree(), "h100-sxm")
    assert set(gpus) == {str(card), "mine", "a100", "a100-80g"}
    refuse_strangers("search.prices.{}", search.prices, gpus)
    assert Workshop(search).setting(job({"cluster.gpu": str(card)})).usd_per_gpu_hour == 1.5
    with pytest.raises(ConfigError, match=r"^search\.prices\.yours: 'yours' is unknown"):
        refuse_strangers("search.prices.{}", ["mine", "yours"], gpus)


def test_a_space_of_whole_clusters_names_its_gpus() -> None:
    search = question(space={"cluster": [{"gpu": "l4", "nodes": 1}, {"gpu": "t4"}], "replica.tp": [1]})
    assert set(tried(search, {}, "h100-sxm")) == {"l4", "t4"}
    assert tried(question(space={"replica.tp": [1]}), {}, "h100-sxm") == ["h100-sxm", "h100-sxm"]
