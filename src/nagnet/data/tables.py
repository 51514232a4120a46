"""Text from one column of tables: parquet files on disk and data sets on the Hugging Face hub, streamed alike."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nagnet.data.text import text_of_value
from nagnet.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

ROWS_PER_READ = 256
HUB_TIMEOUT = 10.0  # seconds for the first request, which shows whether the hub answers at all


@dataclass(frozen=True)
class HubName:
    """A data set on the hub.

    Attributes:
        name: As the hub spells it, ``owner/name``.
        subset: Its configuration; None for the only or default one.
    """

    name: str
    subset: str | None = None


_READING = "if the cause is passing, run the same command again: finished shards are kept"

# nvidia/Nemotron-ClimbMix itself holds GPT-2 tokens; this is its text, shuffled, as parquet.
SHORT_NAMES = {
    "climbmix": HubName("karpathy/climbmix-400b-shuffle"),
    "fineweb-edu": HubName("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}


class TableStream:
    """The values of one column, read in order and never held as a whole.

    A state is what ``datasets`` needs to go on after a row, and that row's number.
    """

    def __init__(self, label: str, column: str, load: Callable[[], "IterableDataset"]) -> None:
        """Set what to read.

        Args:
            label: What the names of rows begin with.
            column: Column to read.
            load: Opens the stream, anew at each call.
        """
        self._label, self._column, self._load = label, column, load

    def read(self, state: Any) -> Iterator[tuple[Any, list[tuple[str, str | None, str]]]]:
        """Yield (state, rows as name, text or None, reason to drop) in order, from a state or the start.

        Raises:
            UserError: If the stream breaks, or the column is missing or holds no text.
        """
        dataset = self._load().with_format("arrow")
        index = 0
        if state is not None:
            index = state["index"]
            dataset.load_state_dict(state["dataset"])
        else:
            state = {"dataset": dataset.state_dict(), "index": 0}
        tables = iter(dataset.iter(batch_size=ROWS_PER_READ))
        while True:
            table = _guarded(self._label, lambda: next(tables, None), _READING)
            if table is None:
                return
            values = self._values(table)
            names = (f"{self._label}#{index + row:08d}" for row in range(1, len(values) + 1))
            yield state, [(name, *text_of_value(value)) for name, value in zip(names, values, strict=True)]
            index += len(values)
            state = {"dataset": dataset.state_dict(), "index": index}

    def _values(self, table: Any) -> list[bytes | None]:
        import pyarrow as pa

        if self._column not in table.column_names:
            raise _no_column(self._label, self._column, table.column_names)
        column = table.column(self._column)
        _check_type(self._label, self._column, column.type)
        # As bytes, since one undecodable value would make the decoding of the whole table fail.
        return column.cast(pa.large_binary()).to_pylist()


def parquet_stream(paths: Sequence[Path], column: str) -> tuple[TableStream, int]:
    """Open parquet files as one stream.

    Args:
        paths: Files, in the order to read them.
        column: Column that holds the text.

    Returns:
        The stream and about how many bytes of text it holds.

    Raises:
        UserError: If a file is damaged or lacks the column, or the column is not text; the file is named.
    """
    import pyarrow.parquet as parquet

    n_bytes = 0
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise UserError(f"cannot read parquet file {path} ({_first_line(error)}); remove or replace it") from error
        if column not in schema.names:
            raise _no_column(str(path), column, schema.names)
        _check_type(str(path), column, schema.field(column).type)
        for group in range(metadata.num_row_groups):
            chunks = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
            n_bytes += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)

    def load() -> "IterableDataset":
        import datasets

        # Read as bytes: files whose columns differ in kind, or hold what is not UTF-8, then go together.
        features = datasets.Features({column: datasets.Value("large_binary")})
        files = {"train": [str(path.resolve()) for path in paths]}
        options = {"columns": [column], "features": features, "split": "train", "streaming": True}
        # It locks a cache folder while it opens, though a stream keeps nothing there.
        with TemporaryDirectory() as cache:
            open_files = partial(datasets.load_dataset, "parquet", data_files=files, cache_dir=cache, **options)
            return _guarded("parquet files", open_files, "check the files")

    return TableStream("parquet", column, load), n_bytes


def hub_stream(
    data_set: HubName, split: str, column: str, revision: str | None = None
) -> tuple[TableStream, str, int | None]:
    """Open a data set on the Hugging Face hub as a stream; nothing is downloaded as a whole.

    Args:
        data_set: Which one.
        split: Split to read.
        column: Column that holds the text.
        revision: Commit to read; None for the newest.

    Returns:
        The stream, the commit it reads (so that the same can be read again), and the bytes of the split
        where the data set says so, else None.

    Raises:
        UserError: If the hub does not answer, or has no such data set, subset, split or column.
    """
    commit = _commit(data_set.name, revision)

    def load() -> "IterableDataset":
        import datasets

        options = {"split": split, "revision": commit, "streaming": True}
        open_data_set = partial(datasets.load_dataset, data_set.name, data_set.subset, **options)
        return _guarded(data_set.name, open_data_set, "check --subset, --split and the network")

    dataset = load()
    if dataset.column_names is not None and column not in dataset.column_names:
        raise _no_column(data_set.name, column, dataset.column_names)
    known = (dataset.info.splits or {}).get(split)
    return TableStream(data_set.name, column, load), commit, getattr(known, "num_bytes", None) or None


def _commit(name: str, revision: str | None) -> str:
    """Ask the hub for the commit of a data set, once and without retries, so that failure is quick."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=HUB_TIMEOUT).sha or "main"
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise UserError(
            f"the Hugging Face hub has no data set {name}, or it needs a login (hf auth login); check its name"
        ) from error
    except Exception as error:  # the client raises what its HTTP library raises, which changes with its version
        raise UserError(
            f"cannot reach the Hugging Face hub for {name} ({_first_line(error)}); check the network, "
            "or give a folder of parquet files"
        ) from error


def _guarded(label: str, action: Callable[[], Any], remedy: str) -> Any:
    """Call into ``datasets``, which then prints nothing; what goes wrong there becomes one line."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs the errors that it raises
    datasets.disable_progress_bars()
    try:
        return action()
    except (UserError, ImportError, MemoryError):
        raise
    except Exception as error:  # from many libraries: HTTP, file systems, formats
        raise UserError(f"reading {label} failed ({type(error).__name__}: {_first_line(error)}); {remedy}") from error
    finally:
        datasets.logging.set_verbosity(level)


def _check_type(where: str, column: str, kind: Any) -> None:
    import pyarrow.types as types

    checks = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_null)
    if not any(check(kind) for check in checks):
        raise UserError(f"column {column} of {where} holds {kind}, not text; choose another with --column")


def _no_column(where: str, column: str, columns: Sequence[str]) -> UserError:
    return UserError(f"{where} has no column {column}; choose one of {', '.join(columns)} with --column")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
