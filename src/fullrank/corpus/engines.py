"""Engines that count windows: DuckDB here, Spark on a cluster, by one expression of ibis.

The only file that knows ibis and the engines behind it. The expression is the same for all of them
(`grouped`): rows that agree in part, context, next token and block are counted. DuckDB counts the parts one
after the other, in bounded memory; it writes to disk what does not fit. Spark counts all of them at once,
wherever its session runs; the files must lie where its executors can read them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fullrank.corpus.windows import Packing
from fullrank.errors import FullrankError

Engine = Literal["duckdb", "spark"]
Result = TypeVar("Result")

Columns = tuple[list[NDArray[np.int64]], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]
"""Contexts, next, block, count."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What an engine may use."""

    engine: Engine = "duckdb"
    memory: int = 4 << 30
    """Bytes for the whole process."""
    threads: int = 2
    address: str = ""
    """Of Spark: a master such as local[2] or spark://host:7077, or sc://host of Spark Connect."""


def grouped(table: Any, keys: Sequence[str]) -> Any:
    """The one expression: how often each combination of keys occurs, for every engine of ibis."""
    return table.group_by(list(keys)).agg(count=table.count())


def keys_of(packing: Packing) -> tuple[str, ...]:
    return ("part", *packing.columns, "next", "block")


def check_engine(resources: Resources) -> None:
    """Raise before long work if an engine is not installed."""
    modules = (
        ("ibis", "pyarrow", "duckdb") if resources.engine == "duckdb" else ("ibis", "pyarrow", "pyspark")
    )
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        extra = "corpus" if resources.engine == "duckdb" else "corpus,spark"
        raise FullrankError(
            f"--engine {resources.engine} needs {', '.join(missing)}: pip install 'fullrank[{extra}]'"
        )


def counted(
    files: Sequence[Path],
    parts: range,
    packing: Packing,
    resources: Resources,
    scratch: Path,
    work: Callable[[Columns], Result],
) -> Iterator[tuple[int, Result]]:
    """What `work` makes of the counted rows of every part, in order, several at a time.

    `scratch` is for what does not fit the memory.
    """
    engine = _duckdb if resources.engine == "duckdb" else _spark
    return engine(files, parts, packing, resources, scratch, work)


def _duckdb(
    files: Sequence[Path],
    parts: range,
    packing: Packing,
    resources: Resources,
    scratch: Path,
    work: Callable[[Columns], Result],
) -> Iterator[tuple[int, Result]]:
    import duckdb
    import ibis

    # What Python holds of the parts beside the engine is small; see `plan.PART`.
    limit = engine_memory(resources.memory) >> 20
    # Engines side by side, because sorting, between two queries, keeps one processor busy only.
    count = max(1, min(resources.threads, len(parts)))
    connections: list[Any] = []
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def counted_part(part: int) -> Result:
        connection, table = idle.get()
        try:
            query = connection.compile(grouped(table.filter(table.part == part), keys_of(packing)))
            columns = _columns(connection.con.sql(query).to_arrow_table(), packing)
        finally:
            idle.put((connection, table))
        return work(columns)

    pool = ThreadPoolExecutor(count)
    try:
        with _quiet():
            for index in range(count):
                connections.append(
                    ibis.duckdb.connect(
                        threads=max(resources.threads // count, 1),
                        memory_limit=f"{limit // count}MiB",
                        temp_directory=str(scratch / str(index)),
                        preserve_insertion_order=False,
                    )
                )
                # Every part looks into every file, whose row groups are told once.
                connections[-1].con.execute("set parquet_metadata_cache = true")
                paths = [str(file) for file in files]
                idle.put((connections[-1], connections[-1].read_parquet(paths, table_name="windows")))
        waiting: deque[tuple[int, Future[Result]]] = deque()
        for part in parts:
            waiting.append((part, pool.submit(counted_part, part)))
            if len(waiting) > count:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except duckdb.OutOfMemoryException as error:
        raise FullrankError(
            f"DuckDB could not count within {limit} MiB ({_first_line(error)}): give more --memory, or more "
            "room on the disk of --cache"
        ) from error
    except duckdb.IOException as error:
        raise FullrankError(
            f"DuckDB could not read or write ({_first_line(error)}): free some space, or choose another "
            "--cache"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for connection in connections:
            connection.disconnect()


def engine_memory(memory: int) -> int:
    """Bytes of all memory that go to the engine."""
    return max(memory - (1 << 30), memory // 2)


def _spark(
    files: Sequence[Path],
    parts: range,
    packing: Packing,
    resources: Resources,
    scratch: Path,
    work: Callable[[Columns], Result],
) -> Iterator[tuple[int, Result]]:
    import ibis
    from pyarrow import parquet

    result = scratch / "counted"
    try:
        with _session(resources, scratch) as session:
            connection = ibis.pyspark.connect(session)
            # A folder, because a list of thousands of files is more than a plan should carry.
            source = re.sub(r"([][{}*?\\])", r"\\\1", str(files[0].parent.absolute()))
            rows = session.read.option("pathGlobFilter", "*.parquet").parquet(source)
            rows.createOrReplaceTempView("fullrank_windows")
            with _quiet():
                table = connection.table("fullrank_windows")
            expression = grouped(table.filter(table.part >= parts.start), keys_of(packing))
            query = connection.compile(expression)
            session.sql(query).write.partitionBy("part").parquet(str(result.absolute()))
    except FullrankError:
        raise
    # Spark's errors are many kinds, from Java, py4j and gRPC.
    except Exception as error:
        raise FullrankError(
            f"Spark at {resources.address or 'local'} could not be reached or could not count "
            f"({type(error).__name__}: {_first_line(error)}): check --spark and that it sees these files, or "
            "use --engine duckdb"
        ) from error
    for part in parts:
        folder = result / f"part={part}"
        if folder.is_dir():
            yield part, work(_columns(parquet.read_table(folder, partitioning=None), packing))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ibis 12 calls what newer engines are about to drop; our user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def _session(resources: Resources, scratch: Path) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("fullrank corpus")
    if resources.address.startswith("sc://"):
        builder = builder.remote(resources.address)
    else:
        builder = (
            builder.master(resources.address or f"local[{resources.threads}]")
            .config("spark.driver.memory", f"{max(resources.memory >> 20, 512)}m")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", str(scratch.absolute()))
            .config("spark.sql.warehouse.dir", str(scratch.absolute() / "warehouse"))
        )
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def _columns(table: Any, packing: Packing) -> Columns:
    def column(name: str, dtype: Any) -> NDArray[Any]:
        return np.ascontiguousarray(table.column(name).to_numpy(), dtype=dtype)

    contexts = [column(name, np.int64) for name in packing.columns]
    return contexts, column("next", np.int32), column("block", np.int32), column("count", np.int64)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
