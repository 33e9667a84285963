"""Which rank a process is, by the variables of every launcher (case H08)."""

import pytest

from shardsmith.engine.runtime.environment import Environment, detect, local_variables
from shardsmith.errors import Refused


def test_nobody_started_it():
    assert detect({"PATH": "/bin"}) == Environment(rank=0, world=1, local_rank=0, local_world=1, launcher="none")


def test_h08_slurm_without_torchrun():
    found = detect({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"})
    assert (found.rank, found.world, found.local_rank, found.launcher) == (3, 4, 1, "slurm")
    assert found.master == ""  # nobody said where rank 0 is


def test_slurm_step_on_uneven_nodes():
    found = detect(
        {
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "9",
            "SLURM_NTASKS": "11",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "2",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
            "SLURM_STEP_NODELIST": "gpu[07-09],login1",
        }
    )
    assert (found.rank, found.local_world, found.master) == (9, 3, "gpu07:20077")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("host", "host"), ("a,b", "a"), ("n[3,5-6]", "n3"), ("gpu[007-9]-x,z1", "gpu007-x"), ("r1c[1-2],q", "r1c1")],
)
def test_first_host_of_a_node_list(nodes, first):
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": nodes, "MASTER_PORT": "1234"}
    assert detect(env).master == f"{first}:1234"


def test_a_batch_script_is_no_rank():
    env = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert detect(env).launcher == "none"
    assert detect(env | {"SLURM_STEP_ID": "1"}).launcher == "slurm"


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "4000",
}


def test_torchrun_wins_over_the_slurm_job_around_it():
    found = detect(TORCHRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"})
    assert found == Environment(rank=5, world=8, local_rank=1, local_world=4, master="n0:4000", launcher="torchrun")


def test_mpi_launchers():
    ompi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert detect(ompi | local) == Environment(
        rank=2, world=4, local_rank=2, local_world=4, master="127.0.0.1:29500", launcher="openmpi"
    )
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
    assert detect(pmi) == Environment(rank=1, world=2, local_rank=1, local_world=2, master="h:9", launcher="pmi")


def test_hand_set_ranks_on_the_loopback_address_are_local():
    found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (found.local_rank, found.local_world) == (1, 2)


def test_local_variables_are_read_back():
    master = "file:///tmp/meet"
    found = detect(local_variables(1, 2, master=master))
    assert found == Environment(rank=1, world=2, local_rank=1, local_world=2, master=master, launcher="shardsmith")


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["RANK"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK = 4", "WORLD_SIZE = 4", "0 to 3"]),
        ({"RANK": "one", "WORLD_SIZE": "4"}, ["RANK = 'one'"]),
        ({"SLURM_PROCID": "1"}, ["SLURM_NTASKS"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK = 3"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, ["8 ranks", "only 2"]),
        # the classic: RANK=0 exported once for all tasks of a job step
        (
            {"RANK": "0", "WORLD_SIZE": "4", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"},
            ["rank 0 of 4", "rank 3 of 4", "slurm"],
        ),
    ],
)
def test_contradictions_are_refused(env, named):
    with pytest.raises(Refused) as refused:
        detect(env)
    assert [fault.code for fault in refused.value.faults] == ["R101"]
    assert all(word in str(refused.value) for word in named), str(refused.value)
