"""Which measurements an evaluation is made of: rows of (code, ladder, renormalise, residency), and the sweep's list of them.

Owns the rows and what must be known of a model directory to choose them; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.formats import CODES, PLANES
from runtime.artifact import CHECKSUMS, MANIFEST, ModelDirectory
from runtime.config import ModelConfig
from runtime.demo import DEMO_NAME, prepared_demo
from runtime.documents import digests
from runtime.errors import ArtifactError, StrawError
from runtime.ladder import EXACT, AnyLadder, check_precisions, parse_ladder
from runtime.ruled_store import ResidencyForm, check_replay, parse_residency
from runtime.store.pools import Slots

LADDERS = (EXACT, "4,6", "3,6", "2,6", "2,4", "4,4", "1,6", "1,4", "0,6", "0,0")  # 4,4 drops and is exact otherwise
MASS_LADDERS = ("mass:0.7,0.95", "mass:0.5,0.9", "mass:0.3,0.8")
BOTH_PRECISIONS = "mass:0.5,1"  # opens pools for either, whatever K is
V4_FLASH_LAYERS, V4_FLASH_EXPERTS, V4_FLASH_SHAPE = 43, 256, (4096, 2048)
ARTICLE_SLOTS = Slots(1050, 1250, 100, 500)  # of V4-Flash's 43 * 256 experts


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    code: str | None
    ladder: str
    renormalise: bool = True
    residency: str = "none"

    @property
    def name(self) -> str:
        """In words, unique."""
        words = [self.code or "no code", self.ladder, "" if self.renormalise else "no-renormalise", self.residency]
        return " ".join(word for word in words if word)

    @property
    def form(self) -> ResidencyForm:
        """The residency, parsed."""
        return parse_residency(self.residency)

    def parsed(self, num_picks: int) -> AnyLadder:
        """The ladder for K picks; StrawError if it is none."""
        return parse_ladder(self.ladder, num_picks, self.renormalise)


@dataclass(frozen=True, slots=True)
class Model:
    """What must be known of a model directory before it is opened to run."""

    directory: Path
    config: ModelConfig
    codes: tuple[str, ...]
    code: str | None  # the one in use
    slab_bytes: dict[str, int]  # by plane, as they are read
    identity: dict[str, str]

    def check(self, row: Row) -> None:
        """Nothing, if the row can be measured on it.

        Raises:
            StrawError: The row is spelled wrongly, the model lacks its code, or the slots to play along do not suffice.
        """
        num_picks = self.config.num_experts_per_tok
        ladder, slots = row.parsed(num_picks), row.form.slots
        check_precisions(ladder, num_picks, row.code is not None, str(self.directory))
        if row.code is not None and row.code not in self.codes:
            raise StrawError(
                f"--code {row.code}: {self.directory} has {', '.join(self.codes) or 'no 2-bit code'}, expected one of those; run: prep requant {self.directory}"
            )
        if slots is not None:
            check_replay(slots, ladder, num_picks, self.config.num_hidden_layers, row.code == "split")


def read_model(name: str) -> Model:
    """The model directory `name`, or the demo.

    Raises:
        StrawError: It is no model directory, or damaged.
    """
    directory = prepared_demo() if name == DEMO_NAME else Path(name)
    if directory.is_dir() and not (directory / MANIFEST).exists():
        raise ArtifactError(
            f"{directory}: no {MANIFEST} in it, expected a model directory, whose experts are streamed; run: prep layout {directory} MODEL"
        )
    with ModelDirectory(directory) as model:
        codes = tuple(code for code in CODES if code in model.codes)
        strides = {plane: record.slab_stride_bytes for plane, record in model.planes.items()}
        identity = {"fingerprint": model.fingerprint, **digests([directory / CHECKSUMS])}
        return Model(directory, model.config, codes, model.code, strides, identity)


def sweep_rows(model: Model) -> list[Row]:
    """Every ladder of the sweep for every code that is present, with nothing resident and with the article's pools to scale.

    Where nothing can be dropped, renormalising or not is the same and measured once.

    Raises:
        StrawError: The model has no 2-bit precision.
    """
    if not model.codes:
        raise StrawError(
            f"{model.directory}: no 2-bit precision of the experts, expected one to sweep over; run: prep requant {model.directory}"
        )
    num_picks = model.config.num_experts_per_tok
    rows = []
    for code in model.codes:
        for text in dict.fromkeys(for_picks(text, num_picks) for text in LADDERS + MASS_LADDERS):
            ladder = parse_ladder(text, num_picks)
            for residency in ("none", f"replay:{','.join(map(str, scaled_slots(model.config, ladder)))}"):
                rows += [
                    Row(code, text, on, residency) for on in ((True, False) if _drops(ladder, num_picks) else (True,))
                ]
    return rows


def for_picks(text: str, num_picks: int) -> str:
    """A ladder for K = 6 with both numbers at most K."""
    if text == EXACT or not text[0].isdigit():
        return text
    a, b = (min(int(number), num_picks) for number in text.split(","))
    return EXACT if a == num_picks else f"{a},{b}"


def _drops(ladder: AnyLadder, num_picks: int) -> bool:
    """Whether it may drop a pick: where the best one has all the weight, not all are demanded."""
    return ladder.demand([1.0] + [0.0] * (num_picks - 1)).two_bit < num_picks


def scaled_slots(config: ModelConfig, ladder: AnyLadder) -> Slots:
    """The article's slots for its share of this model's experts, at least one a layer.

    A ladder that demands one precision only gets the bytes of the other one too, as the store divides them itself.
    """
    fp4, two_bit = v4_flash_bytes("fp4"), v4_flash_bytes("int2")
    counts: Sequence[float] = ARTICLE_SLOTS
    if not ladder.needs_two_bit(config.num_experts_per_tok):
        counts = [counts[tier] + counts[tier + 2] * two_bit / fp4 for tier in (0, 1)] + [0, 0]
    elif not ladder.needs_fp4(config.num_experts_per_tok):
        counts = [0, 0] + [counts[tier + 2] + counts[tier] * fp4 / two_bit for tier in (0, 1)]
    share = config.num_hidden_layers * config.n_routed_experts / (V4_FLASH_LAYERS * V4_FLASH_EXPERTS)
    fp4_vram, fp4_ram, two_bit_vram, two_bit_ram = (round(count * share) for count in counts)
    least = config.num_hidden_layers
    return Slots(
        fp4_vram,
        max(fp4_ram, least - fp4_vram) if counts[0] else 0,
        two_bit_vram,
        max(two_bit_ram, least - two_bit_vram) if counts[2] else 0,
    )


def v4_flash_bytes(plane: str) -> int:
    """One slab of V4-Flash."""
    return PLANES[plane].slab_bytes(*V4_FLASH_SHAPE)
