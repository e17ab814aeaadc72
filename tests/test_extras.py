"""What an installation without extras says of what it lacks."""

import re
import tomllib
from pathlib import Path

from squall.extras import SERVE, missing

IMPORTED_AS = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "protobuf": "google",
    "prometheus-client": "prometheus_client",
}


def test_every_package_of_the_extra_is_known_by_the_name_that_it_is_imported_with() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    names = [re.split(r"[>=<;]", line)[0].strip() for line in project["project"]["optional-dependencies"]["serve"]]
    assert {IMPORTED_AS.get(name, name) for name in names} == SERVE


def test_only_what_the_extra_brings_is_missing_by_choice() -> None:
    assert missing(ModuleNotFoundError(name="google.protobuf")) == "google"
    assert missing(ModuleNotFoundError(name="polars")) is None
