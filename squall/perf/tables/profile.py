"""Squall's own operator profile: measured times of operators on one kind of GPU, in one Parquet file with a header.

Knows no other format; importers make profiles of them. The rows are one table: `operator`, the columns that say which one it is
(see `operations`; empty where an operator has no such column), and `seconds`. The header is JSON in the file's metadata.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import polars as pl
from msgspec import Struct

from squall.errors import ProfileError
from squall.files import replacing
from squall.perf.decompose import Layout, Product, stages
from squall.perf.hardware import GPUS, Gpu
from squall.perf.spec import ModelSpec
from squall.perf.tables.checks import ROW, checked, known
from squall.perf.tables.operations import OPERATIONS, TEXTS
from squall.perf.tables.source import TableSource
from squall.perf.tables.table import Curve, OperatorTable

VERSION = 1
KEY = "squall-operator-profile"
"""Under which the header lies in the Parquet file's metadata."""

CPU = "cpu"
"""The name of whatever machine `squall profile operators` ran on without a GPU."""


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured.

    Attributes:
        gpu: its name in the catalogue, or any other.
        engine: whose kernels, with its version.
        source: who measured, and where the figures are from.
        models: whose shapes were measured; empty for a grid of shapes that fits any.
        tp: degrees whose shares were measured; empty for any.
        block_size: tokens of a KV block; None where it does not matter or is not known.
        step_s: what a step cost beside its operators, where whole steps were measured too.
    """

    version: int
    gpu: str
    engine: str
    source: str
    models: tuple[str, ...] = ()
    tp: tuple[int, ...] = ()
    block_size: int | None = None
    step_s: float | None = None


class OperatorProfile:
    """A header, and checked rows of each operator by its name."""

    def __init__(self, header: Header, rows: Mapping[str, pl.DataFrame]) -> None:
        self.header = header
        self.rows = dict(rows)

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.rows.values())

    def source(self, curve: type[Curve] = Curve, word: str = "measured") -> TableSource:
        """An `OperatorSource` that reads its times off these rows, by interpolation unless another `curve` is given."""
        header = self.header
        tables = {name: OperatorTable(OPERATIONS[name], rows, curve) for name, rows in self.rows.items()}
        return TableSource(f"{word} ({header.gpu}, {header.engine})", tables, header.step_s)

    def check(self, place: str, gpu: Gpu, tp: int, block_size: int) -> None:
        """Raises ProfileError unless these rows can speak for that GPU, TP degree and block size."""
        header = self.header
        if {header.gpu, gpu.name} <= {*GPUS, CPU} and header.gpu != gpu.name:
            raise ProfileError(
                f"{place}: was measured on {header.gpu}, not on {gpu.name}; set cluster.gpu to it or measure there"
            )
        if header.tp and tp not in header.tp:
            degrees = ", ".join(map(str, header.tp))
            raise ProfileError(f"{place}: was measured for a TP of {degrees}, not {tp}; set replica.tp to one of these")
        if header.block_size is not None and header.block_size != block_size:
            raise ProfileError(
                f"{place}: was measured with KV blocks of {header.block_size} tokens, not {block_size}; "
                f"set replica.block_size = {header.block_size}"
            )

    def check_model(self, place: str, model: ModelSpec, layout: Layout) -> None:
        """Raises ProfileError where these rows are of named models, `model` is none of them, and its products are not there.

        Another name for the same shapes will do: a derived model, or a checkpoint in a folder.
        """
        names = {_plain(name) for name in self.header.models}
        if not names or _plain(model.name) in names or "gemm" not in self.rows:
            return
        held = set(self.rows["gemm"].select("rows", "columns").unique().iter_rows())
        for operator in stages(model, layout)[0].tokens:
            if isinstance(operator, Product) and (operator.rows, operator.columns) not in held:
                raise ProfileError(
                    f"{place}: was measured for {', '.join(self.header.models)}, not for {model.name}, whose "
                    f"{operator.name} of {operator.rows} x {operator.columns} is not in it; measure this model"
                )


def _plain(name: str) -> str:
    """A model's name without who published it."""
    return name.lower().replace("--", "/").rpartition("/")[2]


def gather(
    header: Header, parts: Mapping[str, pl.DataFrame], places: Mapping[str, str], gpu: Gpu | None = None
) -> OperatorProfile:
    """A profile of rows by operator, checked. `places` names the file, or files, that each operator's rows are from."""
    slow = header.gpu == CPU
    rows = {name: checked(OPERATIONS[name], part, places[name], gpu, slow=slow) for name, part in parts.items()}
    return OperatorProfile(header, rows)


def save(profile: OperatorProfile, path: Path) -> None:
    """Writes the profile as Parquet, whole or not at all."""
    columns = dict.fromkeys(name for operation in OPERATIONS.values() for name in operation.columns)
    types = {name: pl.String if name in TEXTS else pl.Int64 for name in columns}
    parts = [
        rows.select(
            pl.lit(operator).alias("operator"),
            *(
                pl.col(name).cast(types[name]) if name in rows.columns else pl.lit(None, types[name]).alias(name)
                for name in columns
            ),
            "seconds",
        )
        for operator, rows in profile.rows.items()
    ]
    try:
        with replacing(path) as beside:
            pl.concat(parts).write_parquet(beside, metadata={KEY: msgspec.json.encode(profile.header).decode()})
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written ({error.strerror or error})") from None


def load(path: Path) -> OperatorProfile:
    """Reads an operator profile. Raises ProfileError, naming the file and what is wrong in it."""
    try:
        header_text = pl.read_parquet_metadata(path).get(KEY)
        frame = pl.read_parquet(path)
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; `squall profile import` makes one") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ProfileError(f"{path}: is not a Parquet file that can be read ({str(error).splitlines()[0]})") from None
    if header_text is None:
        raise ProfileError(f"{path}: is a Parquet file, but no operator profile; make one with `squall profile import`")
    try:
        header = msgspec.json.decode(header_text, type=Header)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{path}: its header is wrong ({error}); import it again") from None
    if header.version != VERSION:
        raise ProfileError(f"{path}: is of version {header.version}, this squall reads version {VERSION}; import it again")
    return OperatorProfile(header, _rows(path, frame, slow=header.gpu == CPU))


def is_operator_profile(path: Path) -> bool:
    """Whether a file is one of this format rather than a profile of whole steps."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def _rows(path: Path, frame: pl.DataFrame, *, slow: bool) -> dict[str, pl.DataFrame]:
    missing = [name for name in ("operator", "seconds") if name not in frame.columns]
    if missing:
        raise ProfileError(f"{path}: has no column {missing[0]!r}; import it again")
    frame = frame.with_row_index(ROW, offset=1)
    rows = {}
    for (name,), part in frame.partition_by("operator", as_dict=True).items():
        operation = known(str(name), str(path))
        lacking = [column for column in operation.columns if column not in frame.columns]
        if lacking:
            raise ProfileError(f"{path}: has no column {lacking[0]!r}, which {name} needs; import it again")
        rows[operation.name] = checked(operation, part, str(path), slow=slow)
    return rows
