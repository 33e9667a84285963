"""The serving half of `shardsmith plan`: `--serve` asks for inference layouts instead of training plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from shardsmith import api
from shardsmith.cli.common import Answer
from shardsmith.plan.file import make_specs
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.model import ModelSpec

WIDTHS = click.Choice(["bfloat16", "float8"])
OPTIONS = (
    click.option("--serve", is_flag=True, help="Plan inference instead of training."),
    click.option("--context", type=int, help="With --serve: tokens of a request in the cache, its prompt included."),
    click.option("--concurrency", type=int, help="With --serve: requests at once."),
    click.option("--ttft-ms", type=float, help="With --serve: longest time to the first token."),
    click.option("--tpot-ms", type=float, help="With --serve: longest time between tokens."),
    click.option("--weights-dtype", type=WIDTHS, default="bfloat16", help="With --serve: dtype of weights."),
    click.option("--cache-dtype", type=WIDTHS, default="bfloat16", help="With --serve: dtype of keys and values."),
)
SERVING = ("context", "concurrency", "ttft_ms", "tpot_ms", "weights_dtype", "cache_dtype")
SHARED = ("serve", "model", "cluster", "nodes", "overrides", "top", "target", "fix", "as_json")
"""Options that both kinds of plans take; every other one belongs to training alone."""


def serving_options(*, training: tuple[str, ...]) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Give a verb the options of serving, and answer itself where `--serve` is given.

    `training` names options that a training plan cannot do without. An option that the other kind of plan has no use
    for is wrong usage, as it would be ignored.
    """

    def decorate(function: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(function)
        def wrapper(*, serve: bool, **kwargs: Any) -> Answer:
            asked = {name: kwargs.pop(name) for name in SERVING}
            wanted = ("context", "concurrency") if serve else training
            _require_usage(serve, wanted)
            return _answer(asked, kwargs) if serve else function(**kwargs)

        for option in reversed(OPTIONS):
            wrapper = option(wrapper)
        return wrapper

    return decorate


def named(options: dict[str, Any]) -> tuple[ModelSpec | str, ClusterSpec | str]:
    """Model and cluster as the options name them, with what `--set` lays over them."""
    if not options["overrides"]:
        return options["model"], options["cluster"]
    return make_specs(options["model"], options["cluster"], nodes=options["nodes"], overrides=options["overrides"])


def _require_usage(serve: bool, wanted: tuple[str, ...]) -> None:
    ctx = click.get_current_context()
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    missing = next((name for name in wanted if name not in given), None)
    if missing:
        raise click.UsageError(f"Missing option '{_option(missing)}'.", ctx)
    strange = sorted(given - {*SERVING, *SHARED} if serve else given & set(SERVING))
    if strange:
        kind = "a training plan" if serve else "serving (--serve)"
        raise click.UsageError(f"'{_option(strange[0])}' belongs to {kind} and would be ignored.", ctx)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _answer(asked: dict[str, Any], shared: dict[str, Any]) -> Answer:
    from shardsmith.design.reports.serving_tables import serving_tables

    model, cluster = named(shared)
    found = api.serve(
        model,
        cluster,
        nodes=shared["nodes"],
        top=shared["top"],
        fix=shared["fix"],
        target=shared["target"],
        context=asked["context"],
        concurrency=asked["concurrency"],
        ttft_ms=asked["ttft_ms"],
        tpot_ms=asked["tpot_ms"],
        dtype=asked["weights_dtype"],
        cache_dtype=asked["cache_dtype"],
    )
    warnings = (str(fault) + "\n" for fault in found.warnings)
    return Answer(data=found.as_json(), show=(*warnings, *serving_tables(found)))
