"""Which rank this process is, by the word of whoever started it.

Every launcher names ranks in its own variables; one function reads them all, refuses contradictions, and never
takes "unset" for "rank 0". Needs no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardsmith.errors import Code
from shardsmith.units import counted

Launcher = Literal["none", "shardsmith", "torchrun", "variables", "openmpi", "pmi", "slurm"]

CONTRADICTION = Code(
    code="R101",
    title="contradictory rank variables",
    because="a process must know which rank it is: two with the same rank write the same files and wait for ever",
)
WRONG_WORLD = Code(
    code="R106",
    title="another number of ranks than the plan's",
    because="a plan says how many ranks share the work, and each needs its process",
)
MASTER_VARIABLE = "SHARDSMITH_MASTER"
"""Where ranks started by shardsmith itself meet: `file://PATH`, local and without a port."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Which rank this process is. `launcher` "none": nobody started it as a rank, so it is alone.

    `local_rank` counts on this node, of `local_world` (the smallest possible where the launcher does not say).
    `master` is `host:port` of rank 0 or `file://PATH`; empty where it is not known or not needed.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master: str = ""
    launcher: Launcher = "none"


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the rank from the variables of torchrun, Open MPI, MPICH/PMI or SLURM, or of this tool itself.

    The innermost launcher counts (torchrun or mpirun inside a SLURM job). Raises `Refused` (R101) where
    values are incomplete, out of range, or hand-set RANK and WORLD_SIZE contradict a launcher.
    """
    env = os.environ if variables is None else variables
    plain = _plain(env)
    others = [found for found in (_openmpi(env), _pmi(env), _slurm(env)) if found is not None]
    if plain is not None and plain.launcher == "variables":
        for other in others:
            if (plain.rank, plain.world) != (other.rank, other.world):
                raise CONTRADICTION.refuse(
                    f"this process is rank {plain.rank} of {plain.world} and rank {other.rank} of {other.world}",
                    ("RANK, WORLD_SIZE", f"{plain.rank}, {plain.world}"),
                    (other.launcher, f"{other.rank}, {other.world}"),
                    hint="unset RANK and WORLD_SIZE, or start without " + other.launcher,
                )
    return plain or next(iter(others), Environment())


def require_world(here: Environment, world: int) -> None:
    """Raise `Refused` (R106) if a launcher started another number of ranks than `world`."""
    if here.launcher != "none" and here.world != world:
        raise WRONG_WORLD.refuse(
            f"the plan needs {counted(world, 'rank')}, but {here.world} were started",
            ("plan", f"world = {world}"),
            (here.launcher, f"world = {here.world}"),
            hint=f"start {world} processes, or change a degree of the plan so that its world is {here.world}",
        )


def local_variables(rank: int, world: int, *, master: str) -> dict[str, str]:
    """The variables that make `detect` see local rank `rank` of `world`, meeting at `master` (`file://PATH`)."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        MASTER_VARIABLE: master,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _plain(env: Mapping[str, str]) -> Environment | None:
    """RANK and WORLD_SIZE, as torchrun, Kubernetes operators and this tool set them."""
    found = _counted(env, "RANK", "WORLD_SIZE")
    if found is None:
        return None
    rank, world = found
    address = env.get("MASTER_ADDR", "")
    # on the loopback address all ranks are local, whether or not anybody counted them
    same_node = address in ("localhost", "127.0.0.1", "::1") or MASTER_VARIABLE in env
    local = _counted(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE", world_needed=False) or (
        (rank, world) if same_node else (0, 1)
    )
    launcher: Launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "variables"
    if MASTER_VARIABLE in env:
        launcher = "shardsmith"
    return _environment(env, launcher, rank, world, *local, address=address)


def _openmpi(env: Mapping[str, str]) -> Environment | None:
    prefix = "OMPI_COMM_WORLD"
    found = _counted(env, f"{prefix}_RANK", f"{prefix}_SIZE")
    local = _counted(env, f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE", world_needed=False)
    return None if found is None else _environment(env, "openmpi", *found, *(local or (0, 1)))


def _pmi(env: Mapping[str, str]) -> Environment | None:
    found = _counted(env, "PMI_RANK", "PMI_SIZE")
    local = _counted(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", world_needed=False)
    return None if found is None else _environment(env, "pmi", *found, *(local or (0, 1)))


def _slurm(env: Mapping[str, str]) -> Environment | None:
    """A task of srun. A batch script itself is no task, although it has a SLURM_PROCID."""
    if "SLURM_PROCID" not in env or ("SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env):
        return None
    found = _counted(env, "SLURM_PROCID", "SLURM_NTASKS")
    assert found is not None, "SLURM_PROCID is set"
    rank, world = found
    local_rank = _integer(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else 0
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    per_node = _tasks_per_node(tasks)
    node = int(env.get("SLURM_NODEID", "0"))
    local_world = per_node[node] if node < len(per_node) else local_rank + 1
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    job = int(env.get("SLURM_JOB_ID", "0"))
    return _environment(
        env, "slurm", rank, world, local_rank, local_world, address=_first_host(hosts), port=20_000 + job % 20_000
    )


def _environment(
    env: Mapping[str, str],
    launcher: Launcher,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    *,
    address: str = "",
    port: int = 29_500,
) -> Environment:
    address = env.get("MASTER_ADDR", address)
    if not address and (world == 1 or local_world == world):
        address = "127.0.0.1"
    master = f"{address}:{env.get('MASTER_PORT', port)}" if address else ""
    if local_world > world:
        raise CONTRADICTION.refuse(
            f"{counted(local_world, 'rank')} on this node, but only {world} in all",
            (launcher, f"local world = {local_world}, world = {world}"),
        )
    return Environment(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        master=env.get(MASTER_VARIABLE, master),
        launcher=launcher,
    )


def _counted(
    env: Mapping[str, str], rank_name: str, world_name: str, *, world_needed: bool = True
) -> tuple[int, int] | None:
    """Both numbers, checked; None if neither is set. Without a world where none is needed: the smallest possible."""
    missing = [name for name in (rank_name, world_name) if name not in env]
    if len(missing) == 2 or (not world_needed and rank_name in missing):
        return None
    if missing and world_needed:
        present = rank_name if missing == [world_name] else world_name
        raise CONTRADICTION.refuse(
            f"{present} is set but {missing[0]} is not",
            ("environment", f"{present} = {env[present]}"),
            hint=f"set {missing[0]} too, or unset {present}",
        )
    rank = _integer(env, rank_name)
    world = rank + 1 if missing else _integer(env, world_name)
    if not 0 <= rank < world:
        raise CONTRADICTION.refuse(
            f"{rank_name} = {rank} is not below {world_name} = {world}",
            ("environment", f"{rank_name} = {rank}"),
            ("environment", f"{world_name} = {world}"),
            hint=f"{rank_name} from 0 to {max(world - 1, 0)}",
        )
    return rank, world


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise CONTRADICTION.refuse(
            f"{name} = {env[name]!r} is not a whole number", ("environment", f"{name} = {env[name]}")
        ) from None


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's run-length form: `4(x2),3` -> [4, 4, 3]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _first_host(text: str) -> str:
    """First host of a SLURM node list: `gpu[07-09,12],login1` -> gpu07."""
    head = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\](.*?)(?=,|$))?", text)
    return "" if head is None else "".join(part or "" for part in head.groups())
