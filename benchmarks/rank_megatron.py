"""One rank of megatron-core, with a stand-in for CUDA, which its training path takes for granted.

Its fused kernels are off (they need CUDA); attention gets an explicit causal mask. The distributed optimiser
stands for ZeRO level 1.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from inputs import batch, initial_weights
from meter import Meter
from rank_options import rank_options
from torch import Tensor
from torch.overrides import TorchFunctionMode
from workload import BETAS, EPS, GLOBAL_BATCH, LR, MICROBATCH, SHAPE, WEIGHT_DECAY

CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Turns a literal `device="cuda"` into the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)


class _Nothing:
    """A stream or event without a device: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def stand_in_for_cuda() -> None:
    """Let code that names CUDA run on the CPU; must come before megatron is imported."""
    kind = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(self, *args, **kwargs)
        return kind(self).replace("cuda.", "").replace("torch.", "torch.cuda.", 1)

    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = _Nothing
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = type_name  # the distributed optimiser asks for "torch.cuda.FloatTensor"
    _OnCpu().__enter__()


def main() -> None:
    warnings.filterwarnings("ignore")
    chosen = rank_options()
    torch.set_num_threads(1)
    stand_in_for_cuda()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(chosen.tensor, chosen.pipeline)
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *args, **kwargs: contextlib.nullcontext()
    model, optimizer = _build(chosen)
    forward_backward = get_forward_backward_func()
    data_rank = parallel_state.get_data_parallel_rank()
    causal = torch.triu(torch.ones(SHAPE.seq_len, SHAPE.seq_len), 1).bool()[None, None]
    positions = torch.arange(SHAPE.seq_len).expand(MICROBATCH, SHAPE.seq_len)

    def forward(batches: Iterator[tuple[Tensor, Tensor]], module: Any) -> tuple[Tensor, Any]:
        tokens, targets = next(batches)
        losses = module(tokens, positions, causal, labels=targets)
        return losses, lambda out: (out.mean(), {"loss": out.detach().mean()})

    meter = Meter(chosen.warmup)
    for step in range(chosen.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = forward_backward(
            forward_step_func=forward,
            data_iterator=iter(batch(chosen.inputs, step, data_rank, chosen.data)),
            model=[model],
            num_microbatches=GLOBAL_BATCH // MICROBATCH // chosen.data,
            seq_length=SHAPE.seq_len,
            micro_batch_size=MICROBATCH,
            forward_only=False,
        )
        optimizer.step()
        meter.step(sum(float(part["loss"]) for part in found) / len(found) if found else None)
    meter.done()


def _build(chosen: argparse.Namespace) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = _transformer_settings(chosen)
    module = GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=SHAPE.vocab,
        max_sequence_length=SHAPE.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(SHAPE.rope_theta),
        share_embeddings_and_output_weights=False,
    )
    _load(module, chosen)
    sharded = chosen.zero == 1
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=sharded
    )
    model = DistributedDataParallel(settings, reduction, module)
    settings.finalize_model_grads_func, settings.no_sync_func = finalize_model_grads, model.no_sync
    adam = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(adam, [model])
    for group in optimizer.param_groups:
        group["lr"] = LR
    return model, optimizer


def _transformer_settings(chosen: argparse.Namespace) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=SHAPE.layers,
        hidden_size=SHAPE.hidden,
        num_attention_heads=SHAPE.heads,
        num_query_groups=SHAPE.kv_heads,
        ffn_hidden_size=SHAPE.ffn,
        kv_channels=SHAPE.head_dim,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=SHAPE.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=chosen.tensor,
        pipeline_model_parallel_size=chosen.pipeline,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )


def _load(module: Any, chosen: argparse.Namespace) -> None:
    """Copy this rank's part of the common initial weights into megatron's own layout."""
    from megatron.core import parallel_state

    first = parallel_state.get_pipeline_model_parallel_rank() * (SHAPE.layers // chosen.pipeline)
    index, ranks = parallel_state.get_tensor_model_parallel_rank(), chosen.tensor
    full = initial_weights(chosen.inputs)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_part(name, full, first, index, ranks))


def _part(name: str, full: dict[str, Tensor], first: int, index: int, ranks: int) -> Tensor:
    """The shard of one of megatron's parameters; q, k, v are interleaved by group, gate and up are stacked."""
    ends = {"embedding": "embedding.weight", "output_layer": "head.weight"}
    for start, ours in ends.items():
        if name.startswith(start):
            return full[ours].chunk(ranks)[index]
    if "final_layernorm" in name:
        return full["final_norm.weight"]
    at = f"layers.{int(name.split('.')[2]) + first}."
    if "input_layernorm" in name:
        return full[at + "norm1.weight"]
    if "pre_mlp_layernorm" in name:
        return full[at + "norm2.weight"]
    if "linear_proj" in name:
        return full[at + "attention.o.weight"].chunk(ranks, 1)[index]
    if "linear_fc2" in name:
        return full[at + "mlp.down.weight"].chunk(ranks, 1)[index]
    if "linear_fc1" in name:
        return torch.cat([full[at + f"mlp.{part}.weight"].chunk(ranks)[index] for part in ("gate", "up")])
    assert "linear_qkv" in name, f"{name} has no counterpart"
    q, k, v = (full[at + f"attention.{part}.weight"].view(SHAPE.kv_heads, -1, SHAPE.hidden) for part in "qkv")
    return torch.cat([q, k, v], 1).chunk(ranks)[index].reshape(-1, SHAPE.hidden)


if __name__ == "__main__":
    main()
