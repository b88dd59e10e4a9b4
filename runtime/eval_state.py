"""What a long measurement has finished, in a JSON file: scores of each row's sequences, rows that are whole, and their pools.

A run that is cut off goes on from here, after the last sequence whose scores are in the file. The file has a digest of itself:
what it says is taken over unseen. Owns the file, and the lock that keeps a second run from it; scores nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import StrawError
from runtime.evaluation import Scores
from runtime.files import atomic_file, make_directory

ANOTHER_OUT = "name another --out"


class EvalState:
    """Rows by name: the scores so far, or the finished result. Without a path it lives in memory."""

    def __init__(self, path: Path | None, settings: dict[str, Any], otherwise: str = ANOTHER_OUT) -> None:
        """Empty, or what the file holds, which no other run may use until `close`. `otherwise` is the user's way out.

        Raises:
            StrawError: The file is damaged, in use, or was begun with other settings.
        """
        self._lock = None if path is None else _locked(path, otherwise)
        self._path, self._settings, self._otherwise = path, json.loads(json.dumps(settings)), otherwise
        try:
            found = self._found(path)
        except BaseException:
            self.close()
            raise
        self._pools: dict[str, str] = {name: row["pools"] for name, row in found["rows"].items() if "pools" in row}
        self._results = {name: row["result"] for name, row in found["rows"].items() if "result" in row}
        self._scores = {
            name: [Scores(**one) for one in row["scores"]] for name, row in found["rows"].items() if "scores" in row
        }

    def close(self) -> None:
        """Another run may use the file; this one can no longer."""
        if self._lock is not None:
            self._lock.close()

    def _found(self, path: Path | None) -> dict[str, Any]:
        found = {"settings": self._settings, "rows": {}}
        if path is not None and path.exists():
            found = _read(path, self._otherwise)
        for name, value in self._settings.items():
            if found["settings"].get(name) != value:
                raise StrawError(
                    f"{path}: begun with {name} {_short(found['settings'].get(name))}, expected {_short(value)}; use the same settings, remove it, or {self._otherwise}"
                )
        return found

    def check_pools(self, row: str, pools: str) -> None:
        """Nothing, if the row's pools, in words, are those that it was begun with; they are kept from its first sequence on.

        Raises:
            StrawError: They are others, so that what is finished of the row does not go with what would be measured.
        """
        begun = self._pools.setdefault(row, pools)
        if begun != pools:
            raise StrawError(
                f"{self._path}: row {row} begun with {begun}, now {pools}; give --slots, or budgets that are free again, remove it, or {self._otherwise}"
            )

    def pools(self, row: str) -> str | None:
        """What `check_pools` has kept; None where nothing is."""
        return self._pools.get(row)

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
        for name in rows.keys() & self._pools.keys():
            rows[name]["pools"] = self._pools[name]
        content = {"settings": self._settings, "rows": rows}
        with atomic_file(self._path) as file:
            file.write(json.dumps(content | {"sha256": _digest(content)}).encode())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _locked(path: Path, otherwise: str) -> BinaryIO:
    """An open file whose lock is held until it is closed, or the process dies."""
    lock = path.with_name(path.name + ".lock")
    try:
        make_directory(path.parent)
        file = lock.open("wb")
    except OSError as error:
        raise StrawError(f"{lock}: cannot be written ({error.strerror}); {otherwise}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StrawError(f"{path}: another run writes it, expected none; wait for it to end, or {otherwise}") from None
    return file


def _read(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        digest = found.pop("sha256")
        reason = None if digest == _digest(found) else "its digest is of other content"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    if reason is not None:
        raise StrawError(f"{path}: damaged or no state of a measurement ({reason}); remove it, or {otherwise}")
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
