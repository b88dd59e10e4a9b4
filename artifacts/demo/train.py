"""Train, round, evaluate and export the demo model: `python -m artifacts.demo.train --corpus DIR --out DIR`.

DIR of the corpus holds train.jsonl.xz and heldout.jsonl. The run keeps its state in OUT/state.pt and resumes from it;
it stops early, exported and evaluated all the same, when --seconds are spent. What it learned goes to OUT/checkpoint,
what it measured to OUT/training_record.json. The schedule follows the share of the tokens that is done: warm-up,
constant rate, linear decay over the last 40 %; over the last fifth the forward uses the rounded weights. One graph is
compiled per layer kind, which takes about two minutes before the first step.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts.demo import data
from artifacts.demo.export import demo_config, export, rounded
from artifacts.demo.forward import Model, initial_weights
from artifacts.demo.optimizer import Optimizer, balance_routers

DECAY_SHARE, ROUNDING_SHARE, WARM_STEPS = 0.4, 0.2, 60
BALANCE_STEP = 1e-3
BUFFERS = ("tid2eid", "gate.bias")


@dataclass
class Record:
    """What a run measured; becomes training_record.json."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory with train.jsonl.xz and heldout.jsonl")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path(__file__).parent / "checkpoint", help="directory of tokenizer.json"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="gets checkpoint/, training_record.json, heldout.jsonl, state.pt"
    )
    parser.add_argument("--tokens", type=float, default=140e6, help="tokens to train on")
    parser.add_argument("--seconds", type=float, default=1e9, help="train no longer than this, over all resumed parts")
    parser.add_argument("--batch", type=int, default=32768, help="tokens a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of vectors and embeddings")
    parser.add_argument(
        "--matrix-rate", type=float, default=5e-3, help="peak learning rate of matrices (0: as --rate, with AdamW)"
    )
    parser.add_argument("--documents", type=int, default=0, help="use only so many documents (0: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenise")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--save-seconds", type=float, default=120, help="write the state this often")
    return parser.parse_args()


def token_stream(args: argparse.Namespace) -> np.ndarray:
    """The training tokens in order, uint16; kept in OUT/tokens.npy for a resumed run."""
    path = args.out / "tokens.npy"
    if path.exists():
        return np.load(path, mmap_mode="r")
    documents, held_back = data.split_held_back(data.read_documents(args.corpus / "train.jsonl.xz"))
    write_held_out(args, held_back)
    if args.documents:
        documents = documents[:: len(documents) // args.documents]
    tokenizer = args.tokenizer / "tokenizer.json"
    plain = data.encode_all(data.plain(documents), tokenizer, args.workers)
    epochs = []
    for epoch in range(8):
        chats = data.encode_all(data.chats(documents, epoch, titled_rounds=3), tokenizer, args.workers)
        epochs.append(data.shuffled_stream(plain + chats, epoch))
        if sum(map(len, epochs)) > args.tokens * 1.02 + 2 * args.batch:
            break
    stream = np.concatenate(epochs)
    print(
        f"plain {sum(map(len, plain)):,} tokens, chats {sum(map(len, chats)):,} an epoch, stream {len(stream):,}",
        flush=True,
    )
    np.save(path, stream)
    return stream


def write_held_out(args: argparse.Namespace, held_back: list[data.Document]) -> None:
    """OUT/heldout.jsonl: the permissively licensed held-out documents, which may be shipped."""
    shipped = [d for d in data.read_documents(args.corpus / "heldout.jsonl") if d.source in data.SHIPPED_SOURCES]
    lines = [json.dumps(document._asdict(), ensure_ascii=False) for document in shipped + held_back]
    (args.out / "heldout.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def held_out_rows(path: Path, tokenizer: Path, length: int) -> np.ndarray:
    """[rows, length + 1] of the documents of `path`, joined in order."""
    pieces = data.encode_all(data.plain(data.read_documents(path)), tokenizer / "tokenizer.json", 1)
    return data.rows_of(np.concatenate(pieces), length)


def on_device(rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of rows [B, T + 1]."""
    tokens = torch.from_numpy(rows.astype(np.int64)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@torch.no_grad()
def mean_loss(model: Model, rows: np.ndarray, device: torch.device, rows_at_once: int) -> float:
    """Nats per token over whole batches of `rows`, the remainder in a last, smaller one."""
    total = 0.0
    for at in range(0, len(rows), rows_at_once):
        total += model.losses(*on_device(rows[at : at + rows_at_once], device)).double().sum().item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


class RouterStatistics:
    """Gathers, per layer, the load, the share of picks repeated by the next token, and the mean sorted weights."""

    def __init__(self, layers: int, experts: int, length: int) -> None:
        self.layers: list[dict[str, Any]] = [{} for _ in range(layers)]
        self.experts, self.length = experts, length

    def __call__(self, layer: int, picks: Tensor, gates: Tensor) -> None:
        load = torch.bincount(picks.flatten(), minlength=self.experts).double()
        rows = picks.view(-1, self.length, picks.shape[-1])
        same = (rows[:, 1:, :, None] == rows[:, :-1, None, :]).any(-1).double().mean().item()
        shares = (gates / gates.sum(-1, keepdim=True)).sort(-1, descending=True).values.mean(0)
        self.layers[layer] = {
            "load_max_over_mean": round((load.max() / load.mean()).item(), 3),
            "load_min_over_mean": round((load.min() / load.mean()).item(), 3),
            "repeat": round(same, 4),
            "sorted_weights": [round(share, 4) for share in shares.tolist()],
        }


class Run:
    """One training run: weights, optimiser, position in the stream, record. Owns OUT/state.pt."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.config = args, demo_config()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.weights = {n: t.to(self.device) for n, t in initial_weights(self.config, seed=1).items()}
        for name, weight in self.weights.items():
            weight.requires_grad_(not name.endswith(BUFFERS) and ".indexer." not in name)
        self.model = Model(self.config, self.weights, dtype, compiled=not args.eager)
        self.optimizer = Optimizer(self.weights, args.rate, args.matrix_rate)
        self.record = Record(
            settings={k: v for k, v in vars(args).items() if not isinstance(v, Path)}, versions=versions()
        )
        self.position = 0

    def load(self) -> None:
        """Continue from OUT/state.pt when it is there."""
        path = self.args.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.optimizer.load_state(state["optimizer"])
        self.record, self.position = Record(**state["record"]), state["position"]
        print(f"resumed at step {self.record.steps}", flush=True)

    def save(self) -> None:
        """Write OUT/state.pt atomically."""
        path = self.args.out / "state.pt"
        state = {
            "weights": self.weights,
            "optimizer": self.optimizer.state(),
            "record": asdict(self.record),
            "position": self.position,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def train(self, stream: np.ndarray) -> None:
        """Steps until the tokens, the seconds or the stream are spent."""
        saved = started = time.perf_counter()
        before = self.record.seconds
        for share, rows in self.batches(stream):
            loss = self.step(share, rows)
            if self.record.steps % 25 == 0 or self.record.steps <= 3:
                self.record.seconds = before + time.perf_counter() - started
                self.note(share, loss)
            if time.perf_counter() - saved > self.args.save_seconds:
                self.save()
                saved = time.perf_counter()
        self.record.seconds = before + time.perf_counter() - started
        self.save()

    def batches(self, stream: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
        """Yield (share done, rows [B, T + 1]); the share follows the clock when that runs out before the tokens."""
        started, before = time.perf_counter(), self.record.seconds
        while True:
            spent = before + time.perf_counter() - started
            share = max(self.record.tokens / self.args.tokens, spent / self.args.seconds)
            if share >= 1:
                return
            taken = stream[self.position : self.position + self.args.batch + 1]
            if len(taken) <= self.args.batch:
                return
            self.position += self.args.batch
            yield share, data.rows_of(np.ascontiguousarray(taken), self.args.length)

    def step(self, share: float, rows: np.ndarray) -> Tensor:
        """One update; returns the mean loss, still on the device."""
        inputs, targets = on_device(rows, self.device)
        if share < 1 - ROUNDING_SHARE:
            loss = self.model.losses(inputs, targets).mean()
            loss.backward()
        else:
            with rounded(self.weights, self.config):
                loss = self.model.losses(inputs, targets).mean()
                loss.backward()
        warm = min(1.0, (self.record.steps + 1) / WARM_STEPS)
        self.optimizer.step(warm * min(1.0, max(1 - share, 0.01) / DECAY_SHARE))
        balance_routers(self.model, BALANCE_STEP if share < 1 - ROUNDING_SHARE / 4 else 0.0)
        self.record.tokens += inputs.numel()
        self.record.steps += 1
        return loss.detach()

    def note(self, share: float, loss: Tensor) -> None:
        """Add a point to the loss curve and print it."""
        record = self.record
        record.curve.append({"step": record.steps, "tokens": record.tokens, "loss": round(loss.item(), 4)})
        rate = record.tokens / record.seconds
        print(
            f"step {record.steps} share {share:.3f} loss {loss.item():.4f} {record.seconds:.0f} s {rate:,.0f} tokens/s",
            flush=True,
        )

    def evaluate(self) -> None:
        """Held-out loss before and after rounding, and what the routers do, into the record."""
        results = self.record.results
        sets = {"corpus": self.args.corpus / "heldout.jsonl", "shipped": self.args.out / "heldout.jsonl"}
        self.model = Model(self.config, self.weights, self.model.dtype, compiled=False)
        for name, path in sets.items():
            for length in (1024, 2048):
                rows = held_out_rows(path, self.args.tokenizer, length)[: 4 if self.device.type == "cpu" else None]
                before = mean_loss(self.model, rows, self.device, 16)
                with rounded(self.weights, self.config):
                    after = mean_loss(self.model, rows, self.device, 16)
                key = f"{name}_{length}"
                results[key] = {
                    "tokens": rows.shape[0] * length,
                    "before_rounding": round(before, 4),
                    "after_rounding": round(after, 4),
                }
                print(key, results[key], flush=True)
        self.model.observe = statistics = RouterStatistics(len(self.model.layers), self.config.n_routed_experts, 1024)
        with rounded(self.weights, self.config):
            mean_loss(self.model, held_out_rows(sets["corpus"], self.args.tokenizer, 1024)[:16], self.device, 16)
        results["routers"] = statistics.layers

    def finish(self) -> None:
        """Evaluate, export, write the record."""
        self.evaluate()
        export(self.weights, self.args.out / "checkpoint")
        text = json.dumps(asdict(self.record), indent=1)
        (self.args.out / "training_record.json").write_text(text + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Of what made the run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"python": platform.python_version(), "torch": torch.__version__, "device": device}


def main() -> int:
    """Run or resume."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    stream = token_stream(args)
    run = Run(args)
    run.load()
    run.train(stream)
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
