"""Evaluation of a model on a rank's share of the test set."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from laconic.optim.prox import zero_share
from laconic.tools.tasks.settings import Event
from laconic.tools.tasks.task import Task, Tensors, right_answers

TEST_BATCH = 500


def evaluate(model: nn.Module, task: Task, tensors: Tensors, rank: int, size: int) -> Event:
    model.eval()
    right, total, answers = 0, 0.0, 0
    x, y = tensors["test_x"][rank::size], tensors["test_y"][rank::size]
    with torch.no_grad():
        for start in range(0, len(y), TEST_BATCH):
            logits = model(task.inputs(x[start : start + TEST_BATCH], None))
            labels = y[start : start + TEST_BATCH]
            right += right_answers(logits, labels)
            total += F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="sum").item()
            answers += labels.numel()
    model.train()
    zeros = zero_share([weight.detach() for weight in model.parameters() if weight.dim() > 1])
    return {"kind": "eval", "right": right, "loss_sum": total, "answers": answers, "zeros": zeros}
