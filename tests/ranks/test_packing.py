"""Packed documents: as if each were alone, in logits and gradients (cases F01 and F02)."""

import numpy as np
import pytest
import torch

from shardsmith.engine.dataset.batches import microbatch_of
from shardsmith.engine.dataset.samples import IGNORED, Sample
from shardsmith.engine.models.attention_mask import attention_mask
from shardsmith.engine.models.whole import whole_model
from shardsmith.engine.parity.certificate import relative_errors
from shardsmith.specs.library import model_named
from shardsmith.specs.model import ModelSpec

pytestmark = pytest.mark.ranks

MODELS = {
    name: model_named(name).with_(layers=2, hidden=16, heads=2, kv_heads=kv, head_dim=8, ffn=24, vocab=17, context=16)
    for name, kv in (("tiny-llama", 1), ("tiny-gpt", 2))
}


class Rows:
    """Samples given one by one."""

    def __init__(self, rows: list[Sample]) -> None:
        self.rows, self.samples, self.seq_len = rows, len(rows), len(rows[0].tokens)

    def sample(self, index: int) -> Sample:
        return self.rows[index]


def packed(*documents: list[int], padding: int = 0) -> Sample:
    """Documents in one sequence."""
    tokens = np.array([t for d in documents for t in d] + [0] * padding)
    labels = np.array([x for d in documents for x in [*d[1:], IGNORED]] + [IGNORED] * padding)
    numbers = np.repeat(np.arange(len(documents) + 1), [*map(len, documents), padding])
    return Sample(tokens=tokens, labels=labels, documents=numbers)


def run_model(spec: ModelSpec, sample: Sample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [S, V] and the gradients of the sum of losses, of a model with the weights of seed 0."""
    torch.manual_seed(0)
    module = whole_model(spec, seed=0, dtype=torch.float64, device=torch.device("cpu"))
    for p in module.parameters():
        p.data += 0.3 * torch.randn_like(p)  # so that attention is far from uniform
    m = microbatch_of(Rows([sample]), 0, np.array([0]))
    logits = module(m.tokens.t(), m.positions.t(), m.documents)
    module.loss_sum(logits, m.labels.t()).backward()
    return logits[:, 0].detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def arrays(tensors):
    return {name: x.numpy() for name, x in tensors.items()}


def pack_and_alone(name: str):
    spec = MODELS[name]
    whole, gradients = run_model(spec, packed([1, 2, 3], [4, 5], padding=1))
    other, _ = run_model(spec, packed([9, 8, 7], [4, 5], padding=1))
    first, of_first = run_model(spec, packed([1, 2, 3]))
    second, of_second = run_model(spec, packed([4, 5]))
    summed = {n: of_first[n] + of_second[n] for n in gradients}
    return {
        "others changed": float((whole[3:5] - other[3:5]).abs().max()),
        "own changed": float((whole[:3] - other[:3]).abs().max()),
        "alone": float(max((whole[:3] - first).abs().max(), (whole[3:5] - second).abs().max())),
        "gradients": max(relative_errors(arrays(gradients), arrays(summed)).values()),
    }


@pytest.mark.parametrize("name", sorted(MODELS))
def test_f01_f02_documents_of_a_pack_are_as_if_alone(run_ranks, name):
    (found,) = run_ranks(1, pack_and_alone, name)
    assert found["others changed"] == 0.0
    assert found["own changed"] > 1e-2
    assert found["alone"] < 1e-12
    assert found["gradients"] < 1e-12


def test_masks_by_hand():
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    mask = attention_mask(4, device=torch.device("cpu"), documents_BS=documents)
    assert mask is not None
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    windowed = attention_mask(4, device=torch.device("cpu"), documents_BS=documents, window=2)
    assert windowed is not None
    assert windowed[1, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert attention_mask(4, device=torch.device("cpu"), window=4) is None
