"""Train the target's decoding heads (``engine.heads``) on its own answers' hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from engine.heads import save_heads
from engine.heads_config import KIND, HeadsDescription, weights_digest
from zoo import heads_data, models, workers
from zoo.distill import ARGMAX_WEIGHT, divergence
from zoo.heads_data import HeadBatch, HiddenRows
from zoo.learning import learn
from zoo.optimizer import SharedOptimizer
from zoo.registry import HEADS, TARGET
from zoo.scored import Scored

NUM_HEADS = 3
#: What the last token's embedding counts for beside the hidden state, whose entries are 19 times as large.
LAST_TOKEN_SCALE = 12.0
LEARNING_RATE = 4e-3
ROWS = 512


class Heads(nn.Module):
    """Heads while they are trained; ``engine.heads.DecodingHeads`` runs them."""

    def __init__(self, embedding: Tensor) -> None:
        """Of a target with this tied ``embedding`` [vocabulary, width]; every head begins by repeating it."""
        super().__init__()
        width = embedding.shape[1]
        blocks = [nn.Linear(width, width, bias=False) for _ in range(NUM_HEADS)]
        for block in blocks:
            nn.init.zeros_(block.weight)
        self.blocks = nn.ModuleList(blocks)
        self._embedding = embedding
        self._output = embedding.to(torch.bfloat16)

    def forward(self, hidden: Tensor, token: Tensor) -> list[Tensor]:
        """Per head logits [rows, vocabulary], after hidden states [rows, width] and last tokens [rows]."""
        x = hidden + LAST_TOKEN_SCALE * self._embedding[token]
        output = self._output if self.training else self._embedding
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self.training):
            blocks = (hidden + nn.functional.silu(block(x)) for block in self.blocks)
            return [nn.functional.linear(block, output).float() for block in blocks]


def heads_loss(heads: Heads, batch: HeadBatch, device: torch.device) -> tuple[Tensor, list[float]]:
    """Training loss, and per head the share of rows whose most probable token is the target's.

    As for the drafters: divergence from the target's distribution at the token the head looks ahead to, and
    some cross-entropy to its mode.
    """
    hidden = torch.from_numpy(batch.hidden).float().to(device)
    loss, agreement = torch.zeros((), device=device), []
    for i, logits in enumerate(heads(hidden, torch.from_numpy(batch.token).to(device))):
        valid = torch.from_numpy(batch.valid[i])
        top_ids = torch.from_numpy(batch.top_ids[i])[valid].to(device)
        top_logp = torch.from_numpy(batch.top_logp[i])[valid].to(device)
        mine, best = logits[valid.to(device)], top_ids[:, 0]
        loss = loss + divergence(mine, top_ids, top_logp)
        loss = loss + ARGMAX_WEIGHT * nn.functional.cross_entropy(mine, best)
        agreement.append(float((mine.argmax(-1) == best).float().mean()))
    return loss, agreement


def train(target: Path, data: HiddenRows, folder: Path, minutes: float) -> Path:
    """Train for a budget of minutes; returns the finished directory ``folder/model``."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embedding = models.load(target).model.embed_tokens.weight.detach().to(device)
    heads = Heads(embedding).to(device)
    optimizer = SharedOptimizer(heads, LEARNING_RATE, LEARNING_RATE)
    batches = heads_data.batches(data, NUM_HEADS, ROWS, seed=12)
    learn(batches, lambda batch: heads_loss(heads, batch, device), optimizer, folder, minutes, window=100)
    described = HeadsDescription(
        kind=KIND,
        num_heads=NUM_HEADS,
        hidden_size=embedding.shape[1],
        vocab_size=embedding.shape[0],
        last_token_scale=LAST_TOKEN_SCALE,
        target=TARGET,
        target_sha256=weights_digest(target),
    )
    save_heads(folder / "model", described, list(heads.parameters()))
    return folder / "model"


def _collect(part: int, target: Path, written: list[Path], folder: Path, minutes: float) -> None:
    torch.set_num_threads(1)
    rows = folder / written[part].name.replace("generated", "hidden", 1)
    if not rows.exists():
        heads_data.collect(target, Scored.load([written[part]]), minutes).save(rows)


def run(data: Path, target: Path, out: Path, minutes: float, read_minutes: float) -> Path:
    """Both stages, on the answers in ``data``; hidden states that exist already are kept.

    ``minutes`` are of processor time: for training, and ``read_minutes`` for the target to read the answers
    in each file of them.
    """
    folder = out / HEADS
    written = sorted(data.glob("generated-*.npz"))
    if not written:
        raise FileNotFoundError(
            f"no answers of the target in {data}; `flotilla zoo distill` has it write them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    workers.run(_collect, (target, written, folder, read_minutes), len(written))
    return train(target, HiddenRows.load(sorted(folder.glob("hidden-*.npz"))), folder, minutes)
