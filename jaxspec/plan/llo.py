"""What a kernel costs, as the TPU compiler writes it down: its final program, in low-level operations (LLO).

A TensorCore issues one *bundle* of operations a cycle, so bundles are cycles as long as nothing waits. The compiler
writes each kernel's bundles to a file, and the units that each of them uses to another. Loops and branches are found
from the jumps: one back is a loop, one forward skips a branch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")
"""Matrix unit, lanes moved, vector arithmetic, results fetched, exp and its like, vector loads and, of them, of spilled
registers, vector stores and, of them, of registers spilled, scalars."""

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]+\s*)?:\s*(?:> ?)*\{(.*)")
_JUMP = re.compile(r"\bsbr\.\w+ (?:\(!?(%p\w+)\) )?target = \$region(\d+)")
_TRIPS = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder (?:\(!?%p\w+\), )?%s\w+, (\d+) /\* loop exit test \*/")
_PLACE = re.compile(r"\bStart(?:/End empty)? region (\d+)")
_COPY = re.compile(r"\bdma\.hbm_to_vmem\b")
_COMMENT = re.compile(r"/\*.*?\*/")  # holds the operations that checks of bounds are for, and regions
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")


@dataclass(frozen=True, order=True)
class Span:
    """Bundles from `begin` up to `end`, which is not of it."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, other: "Span") -> bool:
        return self.begin <= other.begin and other.end <= self.end and self != other


@dataclass(frozen=True)
class Kernel:
    """The final program of one kernel."""

    name: str
    units: Sequence[Sequence[int]]
    """How often each bundle uses each of UNITS; empty where the compiler did not write it."""
    copies: Sequence[int]
    """Copies from HBM that each bundle begins."""
    loops: Mapping[Span, int | None]
    """Their trips; None where these depend on numbers that are not known here."""
    branches: Sequence[Span]
    """What a forward jump skips."""

    @property
    def span(self) -> Span:
        return Span(0, len(self.copies))

    def count(self, unit: str, spans: Sequence[Span]) -> int:
        """How often the bundles of all `spans` use a unit."""
        column = UNITS.index(unit)
        return sum(row[column] for span in spans for row in self.units[span.begin : span.end])

    def spills(self, spans: Sequence[Span]) -> int:
        """Vector registers that the program stores because there are too few, and loads again."""
        once = list(set(spans))
        return self.count("VLOAD:FILL", once) + self.count("VSTORE:SPILL", once)

    def count_copies(self, spans: Sequence[Span]) -> int:
        return sum(sum(self.copies[span.begin : span.end]) for span in spans)

    def streaming_loop(self) -> Span | None:
        """The innermost loop that copies from HBM and multiplies matrices: in attention the one over blocks of keys and
        values."""
        steady = {loop: self.steady(loop) for loop in self.loops}
        loops = [loop for loop, path in steady.items() if self.count("MXU", path) and self.count_copies(path)]
        return min(loops, key=len, default=None)

    def around(self, loop: Span) -> list[Span]:
        """What runs once for all trips of a loop: of the loops that it is in, the rest."""
        return [part for other in self.loops if loop in other for part in self.steady(other)]

    def steady(self, span: Span) -> list[Span]:
        """What runs of a loop's body, or of a branch, in all trips but the first and last: spans, as often as they run.

        The compiler does not say which branches are taken. Taken to be so: of those side by side that multiply matrices
        one, the fastest that needs no loop of open trips for it, as an unmasked body beside a masked one; of those that
        copy likewise, as the copying of a whole block beside that of page after page; of the others all that have no
        loop. Loops of open trips do not run.
        """
        return self._path(span, min, 0)

    def last(self, span: Span, trips: int) -> list[Span]:
        """What runs in the last trip: the other one of each two branches, and loops of open trips, `trips` of them.
        Loops that multiply in a branch of theirs take it once, for the part of a block that is needed."""
        return self._path(span, max, trips)

    def _path(self, span: Span, choose: Callable, trips: int) -> list[Span]:
        parts = self._parts(span)
        path = _without(span, parts)
        kinds: dict[str, list[Span]] = {"multiply": [], "copy": [], "other": []}
        for part in parts:
            if part in self.loops:
                path += self._loop_path(part, choose, trips)
            else:
                kinds[self._kind([part])].append(part)
        taken = [choose(kinds[kind], key=self._slowness) for kind in ("multiply", "copy") if kinds[kind]]
        taken += [branch for branch in kinds["other"] if trips or not any(loop in branch for loop in self.loops)]
        return path + [part for branch in taken for part in self._path(branch, choose, trips)]

    def _loop_path(self, loop: Span, choose: Callable, trips: int) -> list[Span]:
        body, own, fixed = self._path(loop, choose, trips), _without(loop, self._parts(loop)), self.loops[loop]
        if trips and self._kind([loop]) == "multiply" != self._kind(own):
            return body + own * ((fixed or 1) - 1)
        return body * (trips if fixed is None else fixed)

    def _parts(self, span: Span) -> list[Span]:
        """The loops and branches of a span, less those that are in others."""
        return _outermost([part for part in (*self.loops, *self.branches) if part in span])

    def _kind(self, spans: Sequence[Span]) -> str:
        return "multiply" if self.count("MXU", spans) else "copy" if self.count_copies(spans) else "other"

    def _slowness(self, branch: Span) -> tuple[bool, bool, int]:
        """What it is there for is done in a loop of open trips; it has one; the rest of its length."""
        loops = self._open_loops(branch)
        in_loop = self._kind(_without(branch, loops)) != self._kind([branch])
        return in_loop, bool(loops), size(self.steady(branch))

    def _open_loops(self, branch: Span) -> list[Span]:
        return _outermost([loop for loop, trips in self.loops.items() if trips is None and loop in branch])


def size(spans: Sequence[Span]) -> int:
    """Bundles in all of them."""
    return sum(map(len, spans))


def dump_arguments(folder: Path) -> str:
    """LIBTPU_INIT_ARGS that have the compiler write final programs to a folder; read once, when libtpu is loaded."""
    flags = f"dump_to={folder}", "dump_llo_text=true", "dump_llo_pass_label_regex=final.*"
    return " ".join(f"--xla_jf_{flag}" for flag in flags)


def read_kernels(folder: Path) -> list[Kernel]:
    """The kernels that were dumped to a folder; none where there is no such folder."""
    found = [(path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("*final_bundles.txt"))]
    return [_read(path, match[1]) for path, match in found if match and "schedule-analysis" not in path.name]


def _read(path: Path, name: str) -> Kernel:
    bundles = [match[1] for line in path.read_text(errors="replace").splitlines() if (match := _BUNDLE.match(line))]
    places = {number: at for at, text in enumerate(bundles) for number in _PLACE.findall(text)}
    trips = {test: int(count) for text in bundles for test, count in _TRIPS.findall(text)}
    loops: dict[Span, int | None] = {}
    branches = []
    for at, text in enumerate(bundles):
        for condition, region in _JUMP.findall(text):
            to = places.get(region, at + 1)
            if to <= at:
                loops[Span(to, at + 1)] = trips.get(condition)
            elif to > at + 1:
                branches.append(Span(at + 1, to))
    copies = [len(_COPY.findall(_COMMENT.sub("", text))) for text in bundles]
    return Kernel(name, _read_units(path, name, len(bundles)), copies, loops, branches)


def _read_units(path: Path, name: str, bundles: int) -> list[list[int]]:
    compilation = path.name.split("-")[0]
    for file in path.parent.glob(f"{compilation}-{name}-*per-bundle-utilization.txt"):
        _, _, table = file.read_text().partition("UTILIZATION:\n")
        rows = [[int(number) for number in line.split()] for line in table.splitlines() if line.strip()]
        if len(rows) == bundles:
            return rows
    return []


def _outermost(spans: Sequence[Span]) -> list[Span]:
    return sorted({span for span in spans if not any(span in other for other in spans)})


def _without(span: Span, parts: Sequence[Span]) -> list[Span]:
    """What is left of a span without some parts that do not overlap."""
    edges = [span.begin, *(edge for part in parts for edge in (part.begin, part.end)), span.end]
    return [Span(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]
