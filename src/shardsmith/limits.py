"""What this installation and this machine cannot run: said before a verb imports torch or starts a rank."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from shardsmith.errors import Code, Fault, raise_errors
from shardsmith.layout.check import check
from shardsmith.plan.setup import Setup
from shardsmith.specs.model import parameter_count
from shardsmith.units import counted

MOST_VERIFIED_RANKS = 16
MOST_VERIFIED_PARAMETERS = 300_000_000
"""What `verify` runs on one machine without being asked to shrink the plan."""

NO_TORCH = Code(
    code="X201",
    title="torch is not installed",
    because="training, verifying and converting handle real tensors; planning, checking and schedules need no torch",
)
TOO_MANY_RANKS = Code(
    code="X202",
    title="too many ranks to verify on one machine",
    because=f"verify forks every rank of the plan's world here, up to {MOST_VERIFIED_RANKS}",
)
TOO_NARROW = Code(
    code="X208",
    title="dtype too narrow to prove a plan in",
    because="sums in another order differ by the rounding of the dtype, and that of 16 bits is as large as an error "
    "in a gradient: equal and unequal could not be told apart",
)
TOO_LARGE = Code(
    code="X203",
    title="model too large to verify on one machine",
    because="verify holds a full copy of the model, of its gradients and of both results in this machine's memory",
)


NO_SUCH_RANK = Code(
    code="X204",
    title="no such rank",
    because="ranks count from 0 to world - 1, world = pipeline x data x context x tensor",
)
DRY_COMPILE = Code(
    code="X205",
    title="dry run of compiled blocks",
    because="which tensors a compiled block keeps for backward and which it makes again, its compiler decides when it "
    "cuts the graph in two: another memory than that of the operators that a dry run follows, and in no closed form",
)
DRY_AXIS = Code(
    code="X209",
    title="dry run of attention across ranks with dropout",
    because="the closed forms that a dry run is held against do not hold what probabilities of parts of a sequence "
    "take, and figures that nothing confirms are worth nothing",
)


def require_sound(setup: Setup) -> None:
    """Raises `Refused` with every fault of `setup` that forbids running it."""
    raise_errors(check(setup, running=True))


def wide_enough(setup: Setup) -> Setup:
    """`setup` computed in float32 where it says something narrower, whose rounding would hide what differs."""
    if setup.workload.dtype in ("float64", "float32"):
        return setup
    if setup.origin("workload.dtype").startswith("--"):
        raise TOO_NARROW.refuse(
            f"a plan cannot be proven in {setup.workload.dtype}",
            *setup.said("workload.dtype"),
            hint="--dtype float64 (equal to 1e-10) or float32 (2e-5): the plan computes the same in every dtype",
        )
    narrow = dict.fromkeys(("param_dtype", "grad_dtype", "reduce_dtype", "optimizer_dtype"))
    return replace(setup.with_plan(**narrow), workload=replace(setup.workload, dtype="float32"))


def require_torch(verb: str) -> None:
    """Raises `Refused` (X201) where torch, which `verb` needs, is not installed."""
    if find_spec("torch") is None:
        raise NO_TORCH.refuse(f"{verb} needs torch", hint="pip install 'shardsmith[train]'")


def refuse_if_huge(setup: Setup) -> None:
    """Raises `Refused` for more ranks (X202) or a larger model (X203) than `verify` runs on one machine."""
    world, count = setup.plan.world, parameter_count(setup.model)
    if world > MOST_VERIFIED_RANKS:
        raise TOO_MANY_RANKS.refuse(
            f"the plan has {counted(world, 'rank')}",
            *setup.said("plan.data", "plan.tensor", "plan.pipeline"),
            hint="--shrink",
        )
    if count > MOST_VERIFIED_PARAMETERS:
        raise TOO_LARGE.refuse(
            f"{setup.model.name} has {count:,} parameters, more than {MOST_VERIFIED_PARAMETERS:,}",
            (setup.model.name, f"parameters = {count}"),
            hint="--shrink",
        )


def dry_faults(setup: Setup, rank: int | None) -> list[Fault]:
    """What a dry run in particular cannot do."""
    plan, model, faults = setup.plan, setup.model, []
    if rank is not None and not 0 <= rank < plan.world:
        message = f"rank {rank} is not one of the plan's {counted(plan.world, 'rank')}"
        said = setup.said("plan.pipeline", "plan.data", "plan.tensor")
        faults.append(NO_SUCH_RANK.fault(message, ("--rank", f"rank = {rank}"), *said, hint=f"0 to {plan.world - 1}"))
    if plan.compile:
        message = "a compiled block has no operators to follow"
        faults.append(DRY_COMPILE.fault(message, *setup.said("plan.compile"), hint="compile = false"))
    if plan.context > 1 and model.attention_dropout:
        message = f"context = {plan.context} cuts the sequence, and attention drops probabilities"
        said = setup.said("plan.context", "model.attention_dropout")
        faults.append(DRY_AXIS.fault(message, *said, hint="attention_dropout = 0, or context = 1"))
    return faults
