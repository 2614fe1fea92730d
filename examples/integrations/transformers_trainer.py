"""The Trainer of transformers, compressed: a small language model on two processes, with checkpoints.

    torchrun --nproc-per-node 2 examples/integrations/transformers_trainer.py --cpu

Its text is counting, drawn here, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils import data
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from laconic.integrations import TrainerCompression


class Counting(data.Dataset[dict[str, torch.Tensor]]):
    """Lines of 16 numbers below 32 that go up by 1, 2 or 3."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        line = (at + torch.arange(16) * (at % 3 + 1)) % 32
        return {"input_ids": line, "labels": line}


def main(folder: Path, *, cpu: bool, steps: int = 40) -> tuple[Trainer, TrainerCompression]:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    training_args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=cpu,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=steps // 2,
        logging_steps=steps // 8,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=Counting())
    compression = TrainerCompression(trainer, "topk(density=0.02)")
    trainer.add_callback(compression)
    trainer.train()
    return trainer, compression


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small language model, compressed.")
    parser.add_argument("--cpu", action="store_true", help="also where there are GPUs")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "laconic-trainer")
    options = parser.parse_args()
    trainer, compression = main(options.folder, cpu=options.cpu)
    assert compression.handle is not None
    if trainer.is_world_process_zero():
        print(f"{compression.handle.stats().ratio:.0f} times less than dense")
    torch.distributed.destroy_process_group()
