"""Where the processes of a run come from, by the environment alone.

    pith pretrain demo                          `launch` starts ranks, each with this command line
    torchrun -m pith_apps.cli pretrain demo     the command is one rank
    srun pith pretrain demo                     likewise, in a step of several tasks

The trap: workers of the elastic launcher outlive it when it is killed; `cli.py` ties them to it.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from pith_engine.runtime import local_gpus, read_launch

from pith_apps.plan import Machine


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, srun or `launch` started this process."""
    return "RANK" in environment or read_launch(environment).world_size > 1


def find_machine(num_processes: int, environment: Mapping[str, str]) -> Machine:
    """This process's group, or the one it would launch."""
    found, sizes = read_launch(environment), (num_processes, num_processes)
    if is_rank(environment):
        sizes = found.world_size, found.ranks_per_node
    return Machine(world_size=sizes[0], processes_here=sizes[1], num_gpus=local_gpus(found))


def launch(num_processes: int, arguments: Sequence[str]) -> int:
    """Run `pith ARGUMENTS` as ranks on this machine; return the exit code.

    A failing rank, or an interrupt (Ctrl-C, SIGTERM), ends all and is named.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Else each rank would start a thread a core.
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"launched-by-pith-{os.getpid()}",  # `cli.py` finds its launcher by it
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch_config, sys.executable)("-m", "pith_apps.cli", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        text = f"rank {rank} was the first to end, with exit code {failure.exitcode}"
        print(f"pith: {text}; the others were stopped", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt) as error:
        # torch's handler raises even while Python exits: a traceback at a second Ctrl-C.
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)
        number = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        text = f"pith: stopped by {signal.Signals(number).name}"
        if arguments[0] == "pretrain":
            text += "; the same command resumes at the newest complete checkpoint, if any"
        print(text, file=sys.stderr)
        return 128 + number
    return 0
