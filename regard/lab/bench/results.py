"""What a race measures, as it is written to results.json and read from it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class RowWork:
    """The declared cost of a mechanism for one point of a race.

    `flops` are useful ones, `bytes` have to be moved, `state` is what decoding keeps, in bytes. `floor` is the least
    time in seconds, None where the peak of the machine is unknown.
    """

    flops: float
    bytes: float
    state: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class RaceRow:
    """One point: one entrant, one pass, one length.

    `like` is the mechanism whose work it does, None if that is unknown, and then `work` is None as well. `seconds` are
    the quartiles of `repeats` runs. `peak` is the memory of a run in bytes, None where it cannot be counted.
    """

    what: str
    like: str | None
    peer: bool
    passing: str
    N: int
    B: int
    seconds: Quartiles
    repeats: int
    peak: int | None
    work: RowWork | None = None

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return float(self.seconds[1])

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as a dict for results.json, in which the fields of `work` are keys too."""
        row: dict[str, Any] = {
            "what": self.what,
            "like": self.like,
            "peer": self.peer,
            "pass": self.passing,
            "N": self.N,
            "B": self.B,
            "seconds": list(self.seconds),
            "repeats": self.repeats,
            "peak": self.peak,
        }
        if self.work is not None:
            row |= vars(self.work)
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> RaceRow:
        """Reads a row of results.json."""
        work = None
        if row.get("flops") is not None:
            work = RowWork(row["flops"], row["bytes"], row.get("state"), row.get("floor"))
        first, median, third = row["seconds"]
        own = {key: row[key] for key in ("what", "like", "peer", "N", "B", "repeats", "peak")}
        return cls(passing=row["pass"], seconds=(first, median, third), work=work, **own)


@dataclass(frozen=True)
class Absence:
    """An entrant that was left out, and why: of the whole race, or of one pass from N tokens on."""

    what: str
    why: str
    passing: str | None = None
    N: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the absence as results.json has it; one from all of the race has no pass and no length."""
        if self.N is None:
            return {"what": self.what, "why": self.why}
        return {"what": self.what, "pass": self.passing, "N": self.N, "why": self.why}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Absence:
        """Reads an absence of results.json."""
        return cls(row["what"], row["why"], row.get("pass"), row.get("N"))

    @property
    def where(self) -> str:
        """From where on it is absent, in words."""
        if self.N is None:
            return ""
        return f"{self.passing}, from {self.N:,} tokens on"


@dataclass(frozen=True)
class RaceDevice:
    """The device of a race: its peak in FLOP/s, None where it is unknown, and its bandwidth in bytes/s.

    `measured` is True where both were measured here, False where they are what the maker states.
    """

    name: str
    flops: float | None
    bandwidth: float
    measured: bool


@dataclass(frozen=True)
class RaceResults:
    """All that a race measured. `config` is the section of the race as a dictionary."""

    config: Mapping[str, Any]
    device: RaceDevice
    threads: int
    seconds: float
    versions: Mapping[str, str]
    date: str
    interrupted: bool
    rows: Sequence[RaceRow]
    absent: Sequence[Absence]

    def as_dict(self) -> dict[str, Any]:
        """Returns the results as results.json has them."""
        lists = {"rows": [row.as_dict() for row in self.rows], "absent": [row.as_dict() for row in self.absent]}
        return vars(self) | {"device": vars(self.device)} | lists

    @classmethod
    def from_dict(cls, results: Mapping[str, Any]) -> RaceResults:
        """Reads the results of results.json."""
        device = results["device"]
        return cls(
            config=results["config"],
            device=RaceDevice(device["name"], device["flops"], device["bandwidth"], device["measured"]),
            threads=results["threads"],
            seconds=results["seconds"],
            versions=results["versions"],
            date=results.get("date", ""),
            interrupted=results["interrupted"],
            rows=[RaceRow.from_dict(row) for row in results["rows"]],
            absent=[Absence.from_dict(row) for row in results["absent"]],
        )

    def of_pass(self, passing: str) -> list[RaceRow]:
        """Returns the rows of one pass."""
        return [row for row in self.rows if row.passing == passing]

    @property
    def entrants(self) -> list[str]:
        """The names of the entrants that have rows, in order of appearance."""
        return list(dict.fromkeys(row.what for row in self.rows))

    @property
    def passes(self) -> list[str]:
        """The passes that have rows, in order of appearance."""
        return list(dict.fromkeys(row.passing for row in self.rows))

    @property
    def lengths(self) -> list[int]:
        """The numbers of tokens that have rows, in order of appearance."""
        return list(dict.fromkeys(row.N for row in self.rows))
