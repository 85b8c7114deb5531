"""Sessions on the cuda device over a driver of no GPU, in the threads of the ranks."""

from gpu_stand_in import StandIn, World
from jobs import readers_of

from mpiflow.exec.cuda_device import CudaDevice
from mpiflow.exec.failure import Failure
from mpiflow.exec.local import run_local
from mpiflow.exec.session import Session


class Patient(CudaDevice):
    """Nothing on the GPU is done before the host can do no more."""

    def advance(self):
        self.driver.settle()
        return super().advance()


def on_gpus(plan, work, *, blind=False):
    """What `work(session)` gives on each rank."""
    world = World(plan.mesh.size)

    def rank(transport):
        device = Patient(StandIn(world, blind=blind, late=True))
        start = Failure(transport).start_thread
        session = Session(plan, transport, readers_of(plan), start_thread=start, device=device)
        session.run("initialise")
        result = work(session)
        session.close()
        return result

    return run_local(plan.mesh.size, rank)
