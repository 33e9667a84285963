"""The plan that most verbs take: a plan file or `--plan`, with model, workload and cluster as options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import click

from shardsmith.cli.common import Answer
from shardsmith.plan.file import DEFAULT_MODEL, DEFAULT_SEQ_LEN, make_setup
from shardsmith.plan.setup import Setup
from shardsmith.specs.job import Dtype
from shardsmith.specs.parse import WRONG_VALUE

OPTIONS = (
    click.argument("file", required=False, type=click.Path()),
    click.option("--plan", help="A plan in one line: tensor=2,pipeline=2,microbatches=4."),
    click.option("--model", help=f"Preset, TOML file or Hugging Face folder (without a file: {DEFAULT_MODEL})."),
    click.option("--seq-len", type=int, help=f"Tokens of a sequence (without a file: up to {DEFAULT_SEQ_LEN})."),
    click.option("--global-batch", type=int, help="Sequences of a step (without a file: 2 x pipeline a data rank)."),
    click.option("--cluster", help="Preset or TOML file (default: local)."),
    click.option("--nodes", type=int, help="Nodes of the cluster."),
    click.option(
        "--dtype",
        metavar="|".join(get_args(Dtype)),
        help="Dtype of the computation (default: that of the file; without one float32, and bfloat16 where check or "
        "simulate price a cluster with figures).",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Lay a value over all else: plan.tensor=2.",
    ),
)
KEYS = ("file", "plan", "model", "seq_len", "global_batch", "cluster", "nodes", "dtype", "overrides")
"""Names under which a verb receives the options above; `make_setup` takes the same."""


def plan_options(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Give a verb the argument FILE and the options above, as they are."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def priced_setup(options: dict[str, Any]) -> Setup:
    """The setup that the options state; a dtype that nobody states is bfloat16 on a cluster with figures.

    Raises `Refused` (F102) for float8, which is no dtype of a computation but a mode of the software.
    """
    if options["dtype"] == "float8":
        hint = "--target megatron-core:float8 (or another NAME:float8): products of layers in float8, else bfloat16"
        raise WRONG_VALUE.refuse("dtype = float8 is not allowed here", ("--dtype", "dtype = float8"), hint=hint)
    setup = make_setup(**options)
    if options["dtype"] is None and "workload.dtype" not in setup.origins and setup.cluster.device.peak_tflops:
        setup = make_setup(**options | {"dtype": "bfloat16"})
    return setup


def setup_options(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Give a verb the argument FILE and the options above; it receives the `setup: Setup` that they state.

    Stands under `verb`, so that what is wrong with the input is reported like any other fault.
    """

    @plan_options
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Answer:
        given = {key: kwargs.pop(key) for key in KEYS}
        return function(*args, setup=make_setup(**given), **kwargs)

    return wrapper
