"""What a `runtime tune` that was cut off has measured: beside `runtime.toml` until that is written. Owns the file's name and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.documents import digests
from runtime.eval_rows import Model
from runtime.eval_state import EvalState
from runtime.store.tuned import TUNED
from runtime.tune_trials import Measurer, Quality, Trial, TuneSettings

STATE = f"{TUNED}.state.json"
OTHERWISE = "name another model directory"


class FinishedTrials:
    """A measurer that measures nothing twice, also in another process with the same settings."""

    def __init__(
        self, model: Model, settings: TuneSettings, measurer: Measurer, advance: Callable[[str], None]
    ) -> None:
        """Takes up the file, which no other run may use until `close`; `advance` hears of what need not be measured.

        Raises:
            StrawError: The file is damaged, in use, or of other settings.
        """
        self._measurer, self._advance = measurer, advance
        own = asdict(settings) | {"texts": digests(settings.texts)}
        self._state = EvalState(model.directory / STATE, {"model": model.identity, "code": model.code} | own, OTHERWISE)

    def quality(self, trial: Trial) -> Quality:
        """As of the measurer."""
        return Quality(**self._once("quality", trial, lambda: self._measurer.quality(trial)._asdict()))

    def ms_per_token(self, trial: Trial) -> float:
        """As of the measurer."""
        found = self._once("speed", trial, lambda: {"ms_per_token": self._measurer.ms_per_token(trial)})
        return float(found["ms_per_token"])

    def close(self) -> None:
        """Another run may use the file."""
        self._state.close()

    def _once(self, what: str, trial: Trial, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        name = " ".join([what, trial.ladder, *map(str, trial.shares), trial.prefetch])
        found = self._state.result(name)
        if found is None:
            found = measure()
            self._state.finish(name, found)
        else:
            self._advance(f"{what} of {trial.ladder}")
        return found


def forget_trials(model: Model) -> None:
    """Removes the file: the next `tune` measures anew."""
    for name in (STATE, f"{STATE}.lock"):
        Path(model.directory / name).unlink(missing_ok=True)
