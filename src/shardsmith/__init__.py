"""Shardsmith: plan, run and prove parallel training of large models.

The verbs of the command line as functions. Importing this imports no torch; verbs that run a model do when called.
"""

from shardsmith.api import (
    check,
    convert,
    demo,
    draw,
    explain,
    generate,
    prepare,
    refit,
    search,
    serve,
    simulate,
    solve,
    study,
    train,
    validate,
    verify,
)
from shardsmith.errors import Fault, Refused
from shardsmith.plan.file import loads, make_setup, parse_plan_line, read_job, read_setup
from shardsmith.plan.plan import Plan
from shardsmith.plan.setup import Job, Setup
from shardsmith.specs.cluster import ClusterSpec
from shardsmith.specs.job import Data, Optimisation, Run, Workload
from shardsmith.specs.library import cluster_named, model_named
from shardsmith.specs.model import ModelSpec
from shardsmith.timeline import Span, Timeline

__all__ = [
    "ClusterSpec",
    "Data",
    "Fault",
    "Job",
    "ModelSpec",
    "Optimisation",
    "Plan",
    "Refused",
    "Run",
    "Setup",
    "Span",
    "Timeline",
    "Workload",
    "check",
    "cluster_named",
    "convert",
    "demo",
    "draw",
    "explain",
    "generate",
    "loads",
    "make_setup",
    "model_named",
    "parse_plan_line",
    "prepare",
    "search",
    "read_job",
    "read_setup",
    "refit",
    "serve",
    "simulate",
    "solve",
    "study",
    "train",
    "validate",
    "verify",
]


def __getattr__(name: str) -> str:
    """`shardsmith.__version__`, looked up when it is asked for: the installed distribution says it."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("shardsmith")
