from typing import cast

import pytest
from msgspec.structs import replace

from squall.config import Config, ReplicaSpec
from squall.errors import ConfigError
from squall.live.engine.build import engine_maker
from squall.live.served import ServedModel


def test_a_pipeline_is_simulated_and_not_served() -> None:
    with pytest.raises(ConfigError, match=r"replica.pp is 2; pipeline stages are simulated, not served: use 1"):
        engine_maker(replace(Config(), replica=ReplicaSpec(pp=2)), cast(ServedModel, None))
