"""The columns of a CSV of measured runs: which a row cannot do without, and what each means."""

from __future__ import annotations

import csv
from difflib import get_close_matches
from pathlib import Path

from shardsmith.errors import Code

NO_COLUMN = Code(
    code="F702",
    title="measured runs without a needed column",
    because="a step is predicted from model, device, layout and batch, and judged by its measured time",
)
NO_CSV = Code(code="F703", title="file of measured runs cannot be read", because="measured runs are rows of a CSV file")

NEEDED = {
    "id": "names the row; up to its first `-` the publication",
    "framework": "the software, such as Megatron-LM, DeepSpeed, torchtitan, NeMo",
    "layers": "layers of the model",
    "hidden": "width of the model",
    "heads": "attention heads",
    "seq_len": "tokens of a sequence",
    "gpu": "the device, such as A100-80GB",
    "gpus": "how many",
    "iter_time_best_s": "the measured time of a step, in seconds",
}
OPTIONAL = {
    "arch": "`gpt`, `llama` or `moe`",
    "global_batch": "sequences of a step; or it follows from `micro_batch`",
    "micro_batch": "sequences at a time",
    "kv_heads, head_dim, ffn_hidden, vocab": "sizes of the model, where they are not those of GPT-3",
    "n_experts, topk, expert_ffn": "of a mixture of experts",
    "tp, cp, pp, dp, ep": "degrees; 1 where empty, `dp` what is left",
    "vpp": "stages a rank",
    "sp": "sequence parallelism, `True` or `False`",
    "zero_stage_or_fsdp": "such as `zero1`, `distributed opt`, `zero3`, `fsdp 16`",
    "precision, recompute, flash_attention": "such as `bf16`, `full`, `True`",
    "gpu_peak_tflops_bf16": "dense peak, where it is not the device's own",
    "gpus_per_node, nvlink_domain": "devices of a node, and of the fast domain",
    "intra_bw_GBs, inter_bw_Gbps_per_gpu": "bandwidth inside, and between nodes, in one direction",
    "peak_mem_gb": "measured peak memory, in 1e9 bytes",
    "group": "rows with the same are one job: errors are weighed by group, and layouts ranked in it",
    "quality": "`C`: not scored",
    "year, model, notes, source": "where the row comes from",
}


def require_columns(path: str | Path) -> None:
    """Raise `Refused` with every needed column that the CSV at `path` lacks (F702), or where it is none (F703)."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            header = [name.strip() for name in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise NO_CSV.refuse(
            f"{path} cannot be read: {error}", hint="a CSV file whose first row names its columns"
        ) from None
    missing = [name for name in NEEDED if name not in header]
    if missing:
        said = (str(path), "columns " + ", ".join(header[:12]) + (", ..." if len(header) > 12 else ""))
        meant = {name: close for name in missing if (close := get_close_matches(name, header, n=1, cutoff=0.6))}
        hint = "; ".join(f"{close[0]} may be {name}" for name, close in meant.items())
        raise NO_COLUMN.refuse(
            f"needed columns are missing: {', '.join(missing)}",
            said,
            hint=hint or "a first row that names the columns; the guide says what each means",
        )
