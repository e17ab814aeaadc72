from typing import cast

import pytest
from msgspec.structs import replace

from squall.config import Config, ReplicaSpec
from squall.errors import ConfigError
from squall.live.engine.build import accelerator, engine_maker
from squall.live.served import ServedModel


def test_a_pipeline_is_simulated_and_not_served() -> None:
    with pytest.raises(ConfigError, match=r"replica.pp is 2; pipeline stages are simulated, not served: use 1"):
        engine_maker(replace(Config(), replica=ReplicaSpec(pp=2)), cast(ServedModel, None))


def test_ranks_of_a_replica_share_the_memory_of_the_machine() -> None:
    alone, three = (accelerator(replace(Config(), replica=ReplicaSpec(tp=tp))).memory_bytes for tp in (1, 3))
    assert three == alone // 3
