"""The public verbs as functions. Only here (and in `cli`) do thinking and doing meet.

Nothing at module level imports torch: a verb that runs a model imports the engine when it is called.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardsmith.errors import CODES, Code, raise_errors
from shardsmith.layout.record import Compared
from shardsmith.limits import dry_faults, refuse_if_huge, require_sound, require_torch, wide_enough
from shardsmith.units import counted

if TYPE_CHECKING:
    from shardsmith.design.planner.priced import Priced
    from shardsmith.design.planner.result import SearchResult
    from shardsmith.design.serving.demand import ServingDtype
    from shardsmith.design.serving.search import ServingResult
    from shardsmith.design.simulator.simulation import Simulation
    from shardsmith.design.validation.own_run import OwnRun
    from shardsmith.design.validation.report import Validation
    from shardsmith.engine.checkpoint.convert import Converted
    from shardsmith.engine.dataset.prepare import Prepared, Watch
    from shardsmith.engine.parity.certificate import Certificate
    from shardsmith.plan.setup import Job, Setup
    from shardsmith.schedule.ir import Kind
    from shardsmith.schedule.solve import Solved
    from shardsmith.schedule.study import Study
    from shardsmith.specs.cluster import ClusterSpec
    from shardsmith.specs.job import Dtype
    from shardsmith.specs.model import ModelSpec
    from shardsmith.timeline import Timeline

SMALL_PARAMETERS = 50_000_000
"""Models below this are sampled by one thread."""
LONGEST_S = 24 * 3600.0
"""After so many seconds text that is being generated is given up."""
_CODE = re.compile(r'\bcode="([A-Z]\d+)"')
"""How a code is registered, in the sources."""

UNKNOWN_CODE = Code(code="F001", title="unknown code", because="every rule has one code, printed in its message")


def check(
    setup: Setup | str | Path,
    *,
    running: bool = False,
    target: str | None = None,
    anew: bool = False,
    imbalance: float = 1.0,
    memory_gib: float | None = None,
) -> Priced:
    """Every rule that a setup, or the plan or job file at a path, breaks; states of each stage, and the price.

    On a cluster with figures a legal plan also has its step time and memory, warnings about pitfalls with what they
    cost, what binds, and better neighbours; with `anew` also the best that its degrees, and those one step away, can
    do. The fullest expert rank receives `imbalance` times the mean, and a rank may hold `memory_gib` (None: what the
    device has). `target` names the software that is priced (default: what the file names, else megatron-core).

    `running` makes errors of what a plan may say but the engine cannot do yet. Raises `Refused` only for a
    file that cannot be read, a cap above the device (L106) and an imbalance that the plan cannot have (E107); what is
    wrong with the plan stands in `.faults`.
    """
    from shardsmith.design.planner.priced import Priced, priceable
    from shardsmith.layout.check import examine
    from shardsmith.layout.routing import imbalance_faults
    from shardsmith.plan.file import read_setup

    read = read_setup(setup) if isinstance(setup, (str, Path)) else setup
    if memory_gib is not None:
        from shardsmith.design.planner.question import capped

        read = capped(read, memory_gib)
    target = read.target if target is None else target
    checked = examine(read, running=running)
    if not priceable(checked):
        if not checked.errors:  # no figure shows it, but a wrong one is no less wrong
            raise_errors(imbalance_faults(read, imbalance))
        return Priced(checked=checked, faults=checked.faults)
    from shardsmith.design.cost.subject import DEFAULT_TARGET
    from shardsmith.design.planner.checked import price_checked

    chosen = DEFAULT_TARGET if target is None else target
    return price_checked(checked, chosen, anew=anew, imbalance=imbalance)


def explain(code: str) -> Code:
    """The rule behind an error or warning code. Raises `Refused` (F001) for a code that no rule has.

    A rule stands next to the code that enforces it. Its module is found by reading the sources, so that only
    that one is imported; one of the engine needs torch (X201).
    """
    wanted, where = code.upper(), _modules_of_codes()
    if wanted not in where:
        raise UNKNOWN_CODE.refuse(f"no rule has the code {code!r}", hint="one of " + ", ".join(sorted(where)))
    if wanted not in CODES:
        try:
            import_module(where[wanted])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            require_torch(f"explaining {wanted}")
    return CODES[wanted]


def _modules_of_codes() -> dict[str, str]:
    """The module in which each code is registered."""
    root = Path(__file__).parent
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(("shardsmith", *path.relative_to(root).with_suffix("").parts))
        found |= dict.fromkeys(_CODE.findall(path.read_text(encoding="utf-8")), name)
    return found


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    patterns: Sequence[str] = (),
    eod: str | None = None,
    limit_mb: float | None = None,
    key: str = "text",
    turn: str | None = None,
    force: bool = False,
    watch: Watch | None = None,
) -> Prepared:
    """Turn text into the token file `out`.bin/.idx; see `shardsmith.engine.dataset.prepare.prepare`. Needs no torch."""
    from shardsmith.engine.dataset.prepare import prepare
    from shardsmith.engine.dataset.records import TURN

    return prepare(
        inputs,
        out,
        tokenizer=tokenizer,
        patterns=patterns,
        eod=eod,
        limit_mb=limit_mb,
        key=key,
        turn=TURN if turn is None else turn,
        force=force,
        watch=watch,
    )


def study(
    name: str,
    *,
    pipeline: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    times: str | None = None,
) -> Study:
    """A pipeline schedule, played with equal stages and free communication: grid, bubbles, peaks, closed form.

    `name` is a schedule or `file:PATH`, a grid that brings its own sizes. `times` gives lengths per
    microbatch and rank, such as `F=1,I=1,W=1`. Raises `Refused` for what the schedule forbids, and for a
    grid that is not legal (S013 names the first impossible action).
    """
    from shardsmith.schedule import study

    return study.study(
        name,
        pipeline=pipeline,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        times=times,
    )


def solve(
    stage_times: str | None,
    *,
    pipeline: int | None,
    microbatches: int | None,
    times: str | None = None,
    live: int | None = None,
    deferred: int | None = None,
    effort: float = 20.0,
) -> Solved:
    """The shortest pipeline order for stages of different cost under a memory cap, by a constraint solver.

    `stage_times` such as `1,1,1,1.5` are factors on `times` (`F=1,I=1,W=1`), a stage each, placed in a loop over the
    ranks. `live` and `deferred` cap what a rank holds, in microbatches of one stage. Raises `Refused`.
    """
    from shardsmith.schedule.rules import UNSTATED
    from shardsmith.schedule.solve import parse_stage_times, solve
    from shardsmith.schedule.study import parse_times

    stated = {"pipeline": pipeline, "microbatches": microbatches, "stage times": stage_times}
    missing = [key for key, value in stated.items() if value is None]
    if pipeline is None or microbatches is None or stage_times is None:
        hint = "--pipeline 4 --microbatches 8 --stage-times 1,1,1,1.5"
        raise UNSTATED.refuse(f"{' and '.join(missing)} not stated", ("asked", "schedule = solved"), hint=hint)
    lengths = parse_times(times or "F=1,I=1,W=1")
    return solve(
        parse_stage_times(stage_times),
        pipeline=pipeline,
        microbatches=microbatches,
        shares=(lengths.F, lengths.I, lengths.W),
        live=live,
        deferred=deferred,
        effort=effort,
    )


def draw(study: Study, path: Path) -> Path:
    """A studied schedule as a picture, PNG, SVG or PDF by the ending of `path`; raises `Refused` (F601)."""
    from shardsmith.design.reports.schedule_picture import draw_schedule

    return draw_schedule(study, path)


def simulate(
    setup: Setup,
    *,
    slow: Mapping[int, float] | None = None,
    times: str | None = None,
    target: str | None = None,
    constants: str | Path | None = None,
    imbalance: float | None = None,
    record: bool = True,
) -> Simulation:
    """One step of a plan, event by event: step time, bubble, lanes, and a timeline like a measured one.

    `slow` gives factors on the compute time of global ranks. `times` such as `F=1,I=1,W=1` (seconds per microbatch
    and rank) stands in for the cost model, `target` names the software whose behaviour it prices, `constants` a file
    that `refit` wrote, `imbalance` what the fullest expert rank receives over the mean. Without `record` the timeline
    is left out. Raises `Refused`; see `shardsmith.design.simulator.simulation`.
    """
    from shardsmith.design.cost.constants import values
    from shardsmith.design.simulator.simulation import simulate_plan
    from shardsmith.schedule.study import parse_times

    target = setup.target if target is None and times is None else target
    lengths = None if times is None else parse_times(times, "--times")
    current = None if constants is None else values(constants)
    return simulate_plan(
        setup, slow=slow, times=lengths, target=target, constants=current, imbalance=imbalance, record=record
    )


def search(
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    *,
    global_batch: int,
    seq_len: int,
    nodes: int | None = None,
    dtype: Dtype | Literal["float8"] = "bfloat16",
    top: int = 5,
    fix: Sequence[str] = (),
    memory_gib: float | None = None,
    target: str | None = None,
    imbalance: float = 1.0,
    tokens: float | None = None,
    days: float | None = None,
    goal: Literal["fewest", "cheapest"] | None = None,
    mtbf_hours: float | None = None,
    checkpoint_minutes: float | None = None,
    pareto: Sequence[int] = (),
) -> SearchResult:
    """The best plans to train a model on a cluster, best first, with why; needs no torch.

    In `float8` run the matrix products of layers, cast from bfloat16. `fix` holds plan fields to one value
    (`tensor=8`); the fullest expert rank receives `imbalance` times the mean. With `days` and `tokens` the answer is
    for the `fewest` nodes, of at most `nodes`, that train in time, or the `cheapest` in device hours. `pareto` names
    numbers of nodes: the answer's `pareto` then holds the plans on them that no other beats in time, memory and
    devices. Raises `Refused` for bad input, and where no layout is legal (L101), none fits (L102) or none is fast
    enough (L103), with what would help.
    """
    from shardsmith.design.cost.subject import DEFAULT_TARGET
    from shardsmith.design.planner.goodput import Failures
    from shardsmith.design.planner.question import Question, fixed_fields
    from shardsmith.design.planner.search import search
    from shardsmith.design.targets import FLOAT8
    from shardsmith.specs.job import Workload
    from shardsmith.specs.library import cluster_named, model_named

    spec = cluster_named(cluster, nodes) if isinstance(cluster, str) else cluster
    failures = Failures(interval_s=None if checkpoint_minutes is None else checkpoint_minutes * 60.0)
    return search(
        Question(
            model=model_named(model) if isinstance(model, str) else model,
            workload=Workload(
                seq_len=seq_len, global_batch=global_batch, dtype="bfloat16" if dtype == "float8" else dtype
            ),
            cluster=spec if nodes is None else spec.with_nodes(nodes),
            target=(DEFAULT_TARGET if target is None else target) + (FLOAT8 if dtype == "float8" else ""),
            imbalance=imbalance,
            fixed=fixed_fields(fix),
            count=top,
            fronts=tuple(pareto),
            memory_gib=memory_gib,
            tokens=tokens,
            goal_days=days,
            objective=goal or ("fastest" if days is None else "fewest"),
            failures=failures if mtbf_hours is None else replace(failures, device_hours=mtbf_hours),
        )
    )


def serve(
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    *,
    context: int,
    concurrency: int,
    nodes: int | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    dtype: ServingDtype = "bfloat16",
    cache_dtype: ServingDtype = "bfloat16",
    target: str | None = None,
    top: int = 5,
    fix: Sequence[str] = (),
) -> ServingResult:
    """Inference layouts: data, tensor, pipeline and expert degrees for `concurrency` requests of `context` tokens.

    Counts weights and key/value cache, and says the time to the first token and between tokens by roofline; best
    first among the layouts that hold the requests and meet the targets. `target` names the engine whose behaviour is
    planned for (vllm); `fix` holds degrees (`tensor=4|8`). Raises `Refused` (I101 to I104, I201, I202, X351).
    """
    from shardsmith.design.planner.question import fixed_fields
    from shardsmith.design.serving.demand import DEFAULT_SERVER, Demand
    from shardsmith.design.serving.search import search_serving
    from shardsmith.design.targets import server_named
    from shardsmith.specs.library import cluster_named, model_named

    spec = cluster_named(cluster, nodes) if isinstance(cluster, str) else cluster
    demand = Demand(
        model=model_named(model) if isinstance(model, str) else model,
        cluster=spec if nodes is None else spec.with_nodes(nodes),
        context=context,
        concurrency=concurrency,
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        dtype=dtype,
        cache_dtype=cache_dtype,
        fixed=fixed_fields(fix),
        server=server_named(DEFAULT_SERVER if target is None else target),
    )
    return search_serving(demand, top=top)


def validate(
    path: str | Path, *, cross: str = "none", moe: bool = False, constants: str | Path | None = None
) -> Validation:
    """Every measured run of a CSV beside its prediction, with errors, intervals and quality of choice.

    `cross` names how rows are left out of the fit (`leave-one-group-out`, `leave-one-source-out`,
    `one-scalar-per-source`, `one-refit-per-source`; these need scipy) or is `none`: the shipped constants, with
    those of the file `constants` (as `refit` writes it) over them. Raises `Refused` for a file that cannot be
    read and for an unknown `cross` (F701), or `constants` with one (F704).
    """
    from shardsmith.design.validation import report

    chosen = next((name for name in report.CROSSES if name == cross), None)
    if chosen is None:
        raise UNKNOWN_CROSS.refuse(
            f"there is no cross-validation {cross!r}", hint="one of " + ", ".join(report.CROSSES)
        )
    if chosen != "none" and find_spec("scipy") is None:
        raise NO_SCIPY.refuse(f"{chosen} fits constants, which needs scipy", hint="pip install 'shardsmith[fit]'")
    if chosen != "none" and constants is not None:
        raise CLASHING_CONSTANTS.refuse(
            f"{chosen} fits its own constants",
            ("--cross", chosen),
            ("--constants", str(constants)),
            hint="leave one of the two out",
        )
    return report.validate(path, cross=chosen, moe=moe, constants_file=constants)


def refit(
    log: str | Path,
    setup: Setup,
    *,
    target: str = "shardsmith",
    constants: str | Path | None = None,
    out: str | Path | None = None,
) -> OwnRun:
    """The cost model's constants, moved by ONE run of `setup` whose `log` is at hand.

    The log is our metrics.jsonl, or holds lines of Megatron-LM, DeepSpeed or torchtitan; `target` names the
    software that ran. Each constant moves from its value (that of the file `constants` over the shipped one) as far
    as its own spread between machines allows and the run demands. What moved is written to `out`, which
    `validate(constants=...)` takes. Raises `Refused` for a log that does not fit (F110, F721, F722) and for
    clusters that say too little and unknown targets (H501 to H503, X351).
    """
    from shardsmith.design.cost.constants import values
    from shardsmith.design.validation.own_run import refit_to, write_constants

    found = refit_to(log, setup, target, values(constants))
    if out is not None:
        write_constants(found, out, str(log))
    return found


UNKNOWN_CROSS = Code(
    code="F701", title="unknown cross-validation", because="what is left out decides what an error says"
)
CLASHING_CONSTANTS = Code(
    code="F704",
    title="left-out fits with constants from a file",
    because="a left-out fit starts from the priors, so that the file would be read and ignored",
)
NO_SCIPY = Code(code="X211", title="scipy is not installed", because="only fitting needs it; predicting does not")


def verify(
    setup: Setup, *, steps: int = 2, seed: int = 0, shrunk: bool = False, packed: bool = False, timeout_s: float = 600.0
) -> Certificate:
    """The parity certificate: the plan on its real ranks against one process; see `engine.parity`.

    Runs the plan's true degrees up to 16 ranks; `shrunk` proves a small model under the same kind of plan;
    `packed` puts several documents into each sequence. Computed is in float64 or float32: a setup in a narrower
    dtype is proven in float32, unless that dtype was asked of this very call (X208).
    Raises `Refused` with everything that forbids running the plan.
    """
    require_sound(setup)
    asked, setup = setup, wide_enough(setup)
    if shrunk:
        from shardsmith.plan.shrink import shrink

        setup = shrink(setup)
        require_sound(setup)
    refuse_if_huge(setup)
    require_torch("verify")
    from shardsmith.engine.parity.certificate import certify

    return certify(setup, asked=asked, steps=steps, seed=seed, packed=packed, timeout_s=timeout_s)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The `ranks` of a plan that were run dry, each beside what the model computes, and the seconds it took.

    With experts, those of each rank received `imbalance` times the mean.
    """

    setup: Setup
    ranks: tuple[Compared, ...]
    seconds: float
    imbalance: float = 1.0

    @property
    def fullest(self) -> Compared:
        """The rank with the largest peak."""
        return max(self.ranks, key=lambda compared: compared.run.peak)

    def as_json(self) -> dict[str, Any]:
        """The fullest rank's figures, and those of all of them under `ranks`."""
        return {
            "plan": str(self.setup.plan),
            "world": self.setup.plan.world,
            "imbalance": self.imbalance,
            **self.fullest.as_json(),
            "ranks": [compared.as_json() for compared in self.ranks],
            "seconds": self.seconds,
        }


def dryrun(
    setup: Setup,
    *,
    rank: int | None = None,
    all_stages: bool = False,
    imbalance: float = 1.0,
    workers: int | None = None,
    timeout_s: float = 3600.0,
) -> DryRun:
    """The real training step of `rank` (0) on tensors without data: its peak memory, collectives and FLOPs.

    Of a world of any size, on this machine; with `all_stages` one rank of every position of the pipeline. Beside
    each stands what the closed forms say. A plan need not fit on its devices: that is what a dry run shows.
    Tokens without data choose experts as stated (`layout.routing`): those of a rank that is run receive `imbalance`
    times the mean. Raises `Refused` with everything else that forbids running the plan.
    """
    started = time.monotonic()
    from shardsmith.layout.check import MEMORY, check
    from shardsmith.layout.routing import imbalance_faults

    raise_errors([fault for fault in check(setup, running=True) if fault.code != MEMORY.code])
    raise_errors(dry_faults(setup, rank) + imbalance_faults(setup, imbalance))
    require_torch("dryrun")
    from shardsmith.design.footprint.record import computed
    from shardsmith.engine.dryrun.run import dry_run
    from shardsmith.plan.mesh import positions

    ranks = positions(setup.plan) if all_stages else (rank or 0,)
    found = dry_run(setup, ranks, imbalance=imbalance, workers=workers, timeout_s=timeout_s)
    models = [computed(setup, record.rank, imbalance=imbalance) for record in found]
    compared = tuple(Compared(run=run, model=model) for run, model in zip(found, models, strict=True))
    return DryRun(setup=setup, ranks=compared, seconds=time.monotonic() - started, imbalance=imbalance)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The `folder` of a run, the step at which it began now, and whether it was asked to end (SIGTERM) early.

    `rank` is the one that a launcher made of this process (0 where none did).
    """

    folder: Path
    first: int
    preempted: bool
    rank: int = 0


def train(job: Job, *, pace: str | None = None) -> Trained:
    """Train as `job` says, on local ranks or as the rank that a launcher made of this process.

    `pace` such as `F=20,I=20,W=20` pads every action to that many milliseconds (a B is I + W).
    It goes on from a checkpoint, or begins with the weights of `run.init` or with random ones, as `run` says. In the
    run's folder are metrics.jsonl, TensorBoard events, model.safetensors, and where a step was recorded its timeline
    as JSON, Perfetto trace and picture. Raises `Refused` before anything starts, `RankFailed` with a rank's own error.
    """
    from shardsmith.specs.job_rules import job_faults
    from shardsmith.specs.run_rules import run_faults

    require_sound(job.setup)
    raise_errors([*job_faults(job.data, job.optimisation, job.run), *run_faults(job.run)])
    lengths = _pace(pace)
    require_torch("train")
    from shardsmith.engine.dataset.open import open_data
    from shardsmith.engine.runtime import environment

    setup, folder = job.setup, Path(job.run.folder)
    here = environment.detect()
    environment.require_world(here, setup.plan.world)
    data = open_data(job.data, vocab=setup.model.vocab, seq_len=setup.workload.seq_len)
    from shardsmith.engine.train.beginning import decide

    decide(job, data.train)
    from shardsmith.engine.train.launch import launch
    from shardsmith.engine.train.loop import train_rank

    world, timeout_s = setup.plan.world, job.run.timeout_s
    ended = launch(train_rank, (job, lengths), world=world, timeout_s=timeout_s, log_dir=folder / "logs")
    if here.rank == 0:
        _draw(folder, f"Step {job.run.timeline_step} of {setup.model.name}: {setup.plan or 'one rank'}")
    return Trained(folder=folder, first=ended.first, preempted=ended.preempted, rank=here.rank)


def convert(source: str | Path, target: str | Path) -> Converted:
    """Weights from a Hugging Face folder to the folder of a run, or the other way: `source` says which.

    Reads and writes one tensor at a time. Raises `Refused` for a source that is unsound or in no known
    format, and for a target that holds files already; see `engine.checkpoint`.
    """
    require_torch("convert")
    from shardsmith.engine.checkpoint.convert import convert

    return convert(Path(source), Path(target))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What followed a `prompt`: its `text`, and the `tokens`; `ended` where the last one ends a document."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    ended: bool


def generate(
    folder: str | Path,
    prompts: Sequence[str],
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    tokenizer: str | None = None,
) -> tuple[Sample, ...]:
    """Up to `tokens` tokens after each of `prompts`, by the weights of a run, a checkpoint or a Hugging Face folder.

    `temperature` 0 takes the most likely token, above it tokens are drawn among the `top_k` likeliest (0: all). An
    empty prompt is the end of a document, after which another begins. Raises `Refused` for weights that are unsound
    (F401 to F406) and a tokenizer that is not known (G106) or has more ids than the model (G204).
    """
    require_torch("generate")
    from shardsmith.engine.checkpoint.formats import format_of

    format_of(Path(folder), "FOLDER")
    from shardsmith.engine.checkpoint.companions import token_ids, tokenizer_for
    from shardsmith.engine.checkpoint.open import open_weights
    from shardsmith.engine.dataset.indexed import check_vocabulary
    from shardsmith.engine.dataset.tokenizer import open_tokenizer
    from shardsmith.engine.runtime.forked import run_forked
    from shardsmith.engine.train.sample import Sampling, continue_from
    from shardsmith.specs.model import parameter_count

    model = open_weights(Path(folder), "FOLDER").model
    opened = tokenizer_for(Path(folder)) if tokenizer is None else open_tokenizer(tokenizer)
    raise_errors(check_vocabulary(file=None, tokenizer=opened, vocab=model.vocab))
    stated = token_ids(Path(folder), model.vocab).get("eos_token_id", [])
    ends = {opened.eod, *(stated if isinstance(stated, list) else [stated])}
    sampling = Sampling(count=tokens, temperature=temperature, top_k=top_k, seed=seed, ends=tuple(sorted(ends)))
    given = [[int(one) for one in ids] or [opened.eod] for ids in opened.encode(prompts)]
    # the products of a small model are shorter than the meeting of threads over them
    threads = 1 if parameter_count(model) < SMALL_PARAMETERS else os.cpu_count() or 1
    (found,) = run_forked(continue_from, 1, Path(folder), given, sampling, timeout_s=LONGEST_S, threads=threads)
    return tuple(
        Sample(prompt=prompt, text=opened.decode(out), tokens=tuple(out), ended=out[-1] in ends)
        for prompt, out in zip(prompts, found, strict=True)
    )


def _draw(folder: Path, title: str) -> None:
    """The picture of a run's recorded timeline, if one was recorded."""
    from shardsmith.design.reports.timeline_picture import draw_timeline
    from shardsmith.timeline import Timeline

    if (folder / "timeline.json").exists():
        timeline = Timeline.from_json(json.loads((folder / "timeline.json").read_text()))
        draw_timeline(timeline, folder / "timeline.png", title=title)


def _pace(text: str | None) -> dict[Kind, float]:
    """Seconds of each kind of action from `F=20,I=20,W=20` (milliseconds); a B is I + W."""
    if text is None:
        return {}
    from fractions import Fraction

    from shardsmith.schedule.study import parse_times

    times = parse_times(text, "--pace")
    return {kind: float(length) / 1e3 for kind, length in times.per_stage(Fraction(1)).items()}


DEMO_PLAN = "tensor=2,pipeline=2,data=2,microbatches=4,schedule=one_f_one_b"
DEMO_PROMPTS = ("def __init__(self", "import ", "    return ")


@dataclass(frozen=True, kw_only=True)
class Tour:
    """What `demo` did: losses, the certificate of its plan, what the trained model says, one measured step."""

    first_loss: float
    last_loss: float
    tokens: int
    certificate: Certificate
    samples: tuple[tuple[str, str], ...]
    timeline: Timeline


def demo(out: str | Path = "demo-run", *, steps: int = 250, say: Callable[[str], None] = print) -> Tour:
    """The whole tour on one machine: prepare real text, train in 3-D on 8 ranks, prove the plan, sample, measure.

    The text is Python's own standard library, so nothing is fetched. Fills the folder `out`; `say` is told
    what happens.
    """
    from shardsmith.plan.file import dumps, make_setup
    from shardsmith.plan.setup import Job
    from shardsmith.specs.job import Data, Optimisation, Run
    from shardsmith.timeline import Timeline

    folder, began = Path(out), time.monotonic()

    def tell(text: str) -> None:
        say(f"[{time.monotonic() - began:4.0f} s] {text}")

    setup = make_setup(plan=DEMO_PLAN, model="tiny-llama", seq_len=128, global_batch=16)
    text = folder / "data" / "stdlib"
    tell(f"1. preparing text: Python's standard library -> {text}.bin")
    modules = str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")
    found = prepare([modules], text, tokenizer=f"bpe:{setup.model.vocab}", limit_mb=4, force=True)
    job = Job(
        setup=setup,
        data=Data(path=str(text)),
        optimisation=Optimisation(lr=3e-3),
        run=Run(steps=steps, folder=str(folder), timeline_step=min(10, steps - 1), timeout_s=120.0, overwrite=True),
    )
    (folder / "job.toml").write_text(dumps(job))
    tell(f"2. training {setup.model.name} on {counted(setup.plan.world, 'rank')}: {setup.plan}")
    train(job)
    tell("3. proving that very plan against one process, in float64")
    certificate = verify(replace(setup, workload=replace(setup.workload, dtype="float64")), steps=2)
    tell("4. sampling")
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tour = Tour(
        first_loss=losses[0],
        last_loss=losses[-1],
        tokens=found.meta.tokens,
        certificate=certificate,
        samples=tuple((one.prompt, one.text) for one in generate(folder, DEMO_PROMPTS, tokens=24)),
        timeline=Timeline.from_json(json.loads((folder / "timeline.json").read_text())),
    )
    tell("done")
    return tour
