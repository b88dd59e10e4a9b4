"""What an evaluation has finished, in a JSON file beside its result: scores of each row's sequences, and rows that are whole.

A run that is cut off goes on from here, after the last sequence whose scores are in the file. Owns the file, and the lock that
keeps a second run from it; scores nothing.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import StrawError
from runtime.evaluation import Scores
from runtime.files import atomic_file


class EvalState:
    """Rows by name: the scores so far, or the finished result. Without a path it lives in memory."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Empty, or what the file holds, which no other run may use until `close`.

        Raises:
            StrawError: The file is damaged, in use, or was begun with other settings.
        """
        self._lock = None if path is None else _locked(path)
        self._path, self._settings = path, json.loads(json.dumps(settings))
        found = _read(path) if path is not None and path.exists() else {"settings": self._settings, "rows": {}}
        for name, value in self._settings.items():
            if found["settings"].get(name) != value:
                raise StrawError(
                    f"{path}: begun with {name} {_short(found['settings'].get(name))}, expected {_short(value)}; use the same settings, remove it, or name another --out"
                )
        self._results = {name: row["result"] for name, row in found["rows"].items() if "result" in row}
        self._scores = {
            name: [Scores(**one) for one in row["scores"]] for name, row in found["rows"].items() if "scores" in row
        }

    def close(self) -> None:
        """Another run may use the file; this one can no longer."""
        if self._lock is not None:
            self._lock.close()

    def result(self, row: str) -> dict[str, Any] | None:
        """A whole row's result; None if it is not whole."""
        return self._results.get(row)

    def scores(self, row: str) -> list[Scores]:
        """The scores of a row's first sequences, in order; a copy."""
        return list(self._scores.get(row, []))

    def add(self, row: str, scores: Scores) -> None:
        """One more sequence of the row is done, and written down."""
        self._scores.setdefault(row, []).append(scores)
        self._write()

    def finish(self, row: str, result: dict[str, Any]) -> None:
        """The row is whole: its result takes the place of its scores."""
        self._results[row] = result
        self._scores.pop(row, None)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        rows: dict[str, Any] = {name: {"result": result} for name, result in self._results.items()}
        rows |= {name: {"scores": [asdict(one) for one in scores]} for name, scores in self._scores.items()}
        with atomic_file(self._path) as file:
            file.write(json.dumps({"settings": self._settings, "rows": rows}).encode())


def _locked(path: Path) -> BinaryIO:
    """An open file whose lock is held until it is closed, or the process dies."""
    lock = path.with_name(path.name + ".lock")
    try:
        file = lock.open("wb")
    except OSError as error:
        raise StrawError(f"{lock}: cannot be written ({error.strerror}); name another --out") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StrawError(
            f"{path}: another run writes it, expected none; wait for it to end, or name another --out"
        ) from None
    return file


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        for row in found["rows"].values():
            if "result" not in row:
                [Scores(**one) for one in row["scores"]]
        found["settings"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StrawError(
            f"{path}: damaged or no state of an evaluation ({' '.join(str(error).split())}); remove it, or name another --out"
        ) from None
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
