"""Every rule about schedules, and the checks that all schedules share."""

from __future__ import annotations

from shardsmith.errors import Code, Fault

UNKNOWN = Code(
    code="S001",
    title="unknown schedule",
    because="a schedule is built in under one name, or is the grid in a file (file:PATH)",
)
SIZES = Code(
    code="S002",
    title="impossible pipeline or microbatch count",
    because="a pipeline has at least one rank, and a step at least one microbatch",
)
STAGES_PER_RANK = Code(
    code="S003",
    title="a number of stages per rank that this schedule does not have",
    because="a schedule fixes how many stages a rank holds: GPipe, 1F1B, ZB-H1 one, V shapes two, loops two or more",
)
TIMES = Code(
    code="S004",
    title="unreadable action times",
    because="the grid is played with positive lengths of F, I and W per microbatch and rank; B is I + W",
)
TOO_MANY = Code(
    code="S005",
    title="too many actions to draw",
    because="a grid is played action by action, and nobody reads a million of them",
)
FILE_CLASH = Code(
    code="S006",
    title="the grid file has other sizes than were asked for",
    because="a schedule from a file is exactly the grid in that file",
)
UNSTATED = Code(
    code="S007",
    title="pipeline or microbatches not stated",
    because="a named schedule is built for a number of pipeline ranks and of microbatches",
)
FEW_MICROBATCHES = Code(
    code="S008",
    title="too few microbatches for this schedule",
    because="a schedule that pairs forwards with backwards has to be filled from both ends before it can begin",
)

ASYNCHRONOUS = Code(
    code="S009",
    title="a schedule without a flush cannot be trained",
    because="stages update while microbatches are in flight, so gradients come from older weights than those they "
    "change: the run would not compute what one device computes; such schedules are only simulated",
)

SMALL_GROUP = Code(
    code="S015",
    title="groups of fewer microbatches than ranks",
    because="while a group goes round the loop of stages, every rank needs one of its microbatches to work on",
)

WRONG_RANK = Code(
    code="S010",
    title="action on a rank that does not hold its stage",
    because="only the rank that holds a stage has its weights",
)
REPEATED = Code(
    code="S011",
    title="work done twice",
    because="a repeated forward or backward would count a microbatch's gradient twice",
)
MISSING = Code(
    code="S012",
    title="work left out",
    because="every stage must run forward and backward (B, or I and W) once for every microbatch",
)
IMPOSSIBLE = Code(
    code="S013",
    title="impossible action",
    because="F waits for F of the previous stage; B and I wait for their own F and for B or I of the next stage; "
    "W waits for its own I",
)
OUTSIDE = Code(
    code="S014",
    title="action outside the schedule",
    because="stages and microbatches are numbered without gaps, and an action names one of each",
)

DEADLOCK = Code(
    code="S020",
    title="ranks wait for each other",
    because="a batch of sends and receives ends only when the other end of each has entered its batch too",
)
DISAGREE = Code(
    code="S021",
    title="two ranks disagree about what passes between them",
    because="messages of one pair and direction carry no tag: the k-th sent is the k-th received",
)
NOT_THERE = Code(
    code="S022",
    title="action before its input has arrived",
    because="an input made by another rank must be received before the action that uses it",
)

GRID_FILE = Code(code="F301", title="unreadable grid file", because="a grid file is plain UTF-8 text")
GRID_CELL = Code(
    code="F302",
    title="unreadable grid",
    because="a grid has a row per rank, and cells such as F0, B3, I2.0, W2.0 (stage.microbatch), '.' (idle) "
    "or '=' (the action before goes on)",
)


def size_faults(*, pipeline: int, microbatches: int, source: str) -> list[Fault]:
    """What is wrong with the sizes whatever the schedule: both must be at least 1 (S002)."""
    faults = []
    for key, value in (("pipeline", pipeline), ("microbatches", microbatches)):
        if value < 1:
            faults.append(SIZES.fault(f"{key} = {value} is below 1", (source, f"{key} = {value}"), hint=f"{key} = 1"))
    return faults


def one_stage_faults(*, schedule: str, stages_per_rank: int, source: str) -> list[Fault]:
    """The fault (S003) of asking a schedule with one stage per rank for another number."""
    if stages_per_rank == 1:
        return []
    return [
        STAGES_PER_RANK.fault(
            f"{schedule} holds one stage per rank, not {stages_per_rank}",
            (source, f"stages_per_rank = {stages_per_rank}"),
            (source, f"schedule = {schedule}"),
            hint="stages_per_rank = 1" + (", or schedule = interleaved" if stages_per_rank > 1 else ""),
        )
    ]


def two_stage_faults(*, schedule: str, stages_per_rank: int, source: str) -> list[Fault]:
    """The fault (S003) of asking a V-shaped schedule for anything but two stages per rank."""
    if stages_per_rank == 2:
        return []
    return [
        STAGES_PER_RANK.fault(
            f"{schedule} holds two stages per rank, not {stages_per_rank}",
            (source, f"stages_per_rank = {stages_per_rank}"),
            (source, f"schedule = {schedule}"),
            hint="stages_per_rank = 2",
        )
    ]


def looped_faults(*, schedule: str, pipeline: int, microbatches: int, stages_per_rank: int, source: str) -> list[Fault]:
    """What a looped schedule forbids: impossible sizes, and fewer than two stages per rank (S003)."""
    found = size_faults(pipeline=pipeline, microbatches=microbatches, source=source)
    if stages_per_rank < 2:
        found.append(
            STAGES_PER_RANK.fault(
                f"{schedule} needs at least 2 stages per rank, not {stages_per_rank}",
                (source, f"stages_per_rank = {stages_per_rank}"),
                (source, f"schedule = {schedule}"),
                hint="stages_per_rank = 2, or schedule = one_f_one_b (one stage per rank)",
            )
        )
    return found
