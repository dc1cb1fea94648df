"""Rows of parquet files, batch by batch. pyarrow is imported where one is opened."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundup.errors import UserError
from groundup.files.paths import shown_name
from groundup.files.streams import (
    BOMB_BYTES,
    BOMB_FACTOR,
    MAX_BYTES,
    Damage,
    Record,
)

if TYPE_CHECKING:
    import pyarrow.parquet

BATCH_ROWS = 256


def open_parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    """Raise UserError without pyarrow, Damage if the file's own table of contents, at its end,
    cannot be read."""
    try:
        import pyarrow.parquet
    except ImportError:
        install = "run: pip install pyarrow"
        raise UserError(f"data: {shown_name(path)} needs pyarrow; {install}") from None
    if path == "-":
        raise UserError("data: parquet cannot be read from standard input; give the file's name")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise Damage("truncated_file", str(error), Path(path).stat().st_size) from None


def row_groups(path: str, unit_bytes: int) -> list[tuple[int, int | None]]:
    """Return parts [begin, end) of the row groups of a file, each of about so many bytes."""
    try:
        footer = open_parquet(path).metadata
    except Damage:
        return [(0, None)]  # reported when it is read
    ends, room = [0], 0
    for k in range(footer.num_row_groups):
        size = footer.row_group(k).total_byte_size
        if size > room and k:
            ends.append(k)
        room = (room if size <= room else unit_bytes) - size
    return list(zip(ends, [*ends[1:], footer.num_row_groups], strict=True))


def parquet_records(
    path: str, begin: int, end: int | None, columns: list[str] | None
) -> Iterator[tuple[Record, int]]:
    """Yield (row, about how many bytes it has) of the row groups [begin, end)."""
    row, n_bytes, size = 0, 0, Path(path).stat().st_size
    try:
        file = open_parquet(path)
        groups = range(file.metadata.num_row_groups)
        row = sum(file.metadata.row_group(k).num_rows for k in groups[:begin])
        names = file.schema_arrow.names
        wanted = {name.lower() for name in columns or ()}
        own = [name for name in names if name.lower() in wanted]
        batches = file.iter_batches(BATCH_ROWS, row_groups=groups[begin:end], columns=own or None)
        for batch in batches:
            batch = batch.rename_columns(column_names(batch.schema.names))
            n_bytes += batch.nbytes
            if n_bytes > max(BOMB_BYTES, BOMB_FACTOR * size):
                detail = f"the rows become over {BOMB_FACTOR} times larger than the file"
                hint = "like a bomb; to use them, write them as JSON lines"
                raise Damage("truncated_file", f"{detail}, {hint}", size)
            each = max(1, batch.nbytes // max(1, batch.num_rows))
            for record in batch_records(batch, row):
                yield record, max(each, record.lost)
            row += batch.num_rows
    except Damage as error:
        reason, detail, lost = error.args
        yield Record(None, row + 1, row).fail(reason, detail, lost), lost
    except UserError:
        raise
    except (OSError, ValueError, MemoryError) as error:  # pyarrow's, for damaged pages
        yield Record(None, row + 1, row).fail("truncated_file", str(error), size), size


def column_names(row: Sequence[str]) -> list[str]:
    """Return the names of columns; of two equal ones the second becomes name_2."""
    row, names = list(map(str.strip, row)), []
    for name in row:
        free = (f"{name}_{n}" for n in itertools.count(2) if f"{name}_{n}" not in {*row, *names})
        names.append(next(free) if name in names else name)
    return names


def decode_texts(value: Any) -> Any:
    """Return a value with the bytes in it as text, where they are UTF-8, and the keys of maps."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, dict):
        return {str(decode_texts(key)): decode_texts(one) for key, one in value.items()}
    return [decode_texts(one) for one in value] if isinstance(value, list) else value


def batch_records(batch: "pyarrow.RecordBatch", row: int) -> Iterator[Record]:
    """Yield the rows of a batch that begins at a row of the file; one that is not UTF-8, or that
    Python cannot express, is a problem of its own."""
    try:
        schema = str(batch.schema)
        # pairs become objects; it takes time, so it is asked for where there are any
        values = batch.to_pylist(maps_as_pydicts="lossy" if "map<" in schema else None)
        if "binary" in schema or "map<" in schema:
            values = decode_texts(values)
    except (ValueError, OverflowError, LookupError, OSError, UnicodeDecodeError) as error:
        if (plain := without_times(batch)) is not batch:
            yield from batch_records(plain, row)
        elif batch.num_rows > 1:
            for k in range(batch.num_rows):
                yield from batch_records(batch.slice(k, 1), row + k)
        else:
            problem = "bad_encoding" if isinstance(error, UnicodeDecodeError) else "bad_field"
            yield Record(None, row + 1, row).fail(problem, str(error), max(1, batch.nbytes))
        return
    for k, value in enumerate(values):
        if batch.nbytes > MAX_BYTES and len(str(value)) > MAX_BYTES:
            detail = f"a row of more than {MAX_BYTES:,} characters"
            yield Record(None, row + k + 1, row + k).fail("too_long", detail, 1)
        else:
            yield Record(value, row + k + 1, row + k)


def without_times(batch: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
    """Return a batch with the numbers behind its dates and times: Python has no years beyond 9999,
    and may not know a time zone."""
    import pyarrow

    for k, column in enumerate(batch.columns):
        if pyarrow.types.is_temporal(column.type):
            numbers = column.view(f"int{column.type.bit_width}")
            batch = batch.set_column(k, batch.schema.names[k], numbers)
    return batch
