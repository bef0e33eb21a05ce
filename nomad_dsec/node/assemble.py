"""From settings to a node that has recovered and is about to serve. Nothing here waits for requests."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.errors import ImageError
from dsec_imagefs.store import ImageStore
from libdsec.errors import UsageError

from nomad_dsec.clock import SYSTEM
from nomad_dsec.ids import check_node
from nomad_dsec.linux.procfs import boot_id
from nomad_dsec.node.admission import StartQueue
from nomad_dsec.node.backends import build_backends, build_images, image_directory
from nomad_dsec.node.capacity import Capacity, detect_totals
from nomad_dsec.node.core import Limits, Node
from nomad_dsec.node.create import Creator
from nomad_dsec.node.door import Door
from nomad_dsec.node.execs import Execs
from nomad_dsec.node.failpoints import Failpoints
from nomad_dsec.node.files import Files
from nomad_dsec.node.fingerprint import Fingerprint, default_node_id, machine_cpus, machine_memory_mib
from nomad_dsec.node.foreign import to_dsec
from nomad_dsec.node.grants import Grants
from nomad_dsec.node.journal import Journal
from nomad_dsec.node.lanes import Lanes
from nomad_dsec.node.metrics import NodeMetrics
from nomad_dsec.node.recovery import Recovery
from nomad_dsec.node.routes import Routes
from nomad_dsec.node.routes_fncall import FncallRoutes
from nomad_dsec.node.routes_tasks import TaskRoutes
from nomad_dsec.node.supervisor import Supervisor
from nomad_dsec.node.task_calls import CallTasks
from nomad_dsec.node.task_sweep import Kept, TaskSweep
from nomad_dsec.node.tasks import Tasks
from nomad_dsec.node.tasks_follow import Follower
from nomad_dsec.node.verbs import Verbs

if TYPE_CHECKING:
    from nomad_dsec.backends.base import Backend
    from nomad_dsec.node.core import TaskRoom
    from nomad_dsec.node.images import Images

STARTS_PER_CPU = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A node and the parts that main talks to."""

    node: Node
    door: Door
    supervisor: Supervisor
    creator: Creator
    verbs: Verbs
    execs: Execs
    fingerprint: Fingerprint
    routes: Routes
    lanes: Lanes
    task_routes: TaskRoutes
    tasks: Tasks
    grants: Grants


def open_data(path: Path) -> int:
    """Make the data directory and lock it for this process; returns the descriptor that holds the lock.

    UsageError already_running when another daemon holds it.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UsageError(
            "already_running", f"another node daemon uses {path}", field="node.data", hint="stop it, or give --data"
        ) from error
    return lock


def build_capacity(settings: dict[str, Any]) -> tuple[Capacity, StartQueue]:
    """What the settings and the machine promise."""
    cpus = machine_cpus()
    totals = detect_totals(
        cpus=settings["cpus"],
        memory_mib=settings["memory_mib"],
        sandboxes=settings["sandboxes_max"],
        cpu_overcommit=settings["cpu_overcommit"],
        memory_overcommit=settings["memory_overcommit"],
        machine_cpus=cpus,
        machine_memory_mib=machine_memory_mib(),
    )
    starting_max = settings["starting_max"] or STARTS_PER_CPU * cpus
    granted = settings["capacity"] == "granted"
    capacity = Capacity(
        totals,
        granted=granted,
        cpu_factor=settings["cpu_overcommit"],
        memory_factor=settings["memory_overcommit"],
    )
    capacity.lend(cpus=0.0, memory_mib=0)
    return capacity, StartQueue(starting_max=starting_max, queue_max=settings["queue_max"])


async def build_node(settings: dict[str, Any], room: TaskRoom) -> Node:
    """The node from the settings of the section `node`; opens the image store and the backends."""
    data = Path(settings["data"])
    node_id = check_node(settings["id"] or default_node_id())
    store = None
    if "container" in settings["backends"]:
        try:
            store = ImageStore(image_directory(settings, data))
        except ImageError as error:
            raise to_dsec(error) from error
    backends = await build_backends(settings, node=node_id, data=data, images=store)
    return make_node(
        settings, room, node_id=node_id, data=data, backends=backends, images=build_images(settings, store, SYSTEM)
    )


def make_node(
    settings: dict[str, Any],
    room: TaskRoom,
    *,
    node_id: str,
    data: Path,
    backends: dict[str, Backend],
    images: Images,
    limits: Limits | None = None,
) -> Node:
    """The node around given backends."""
    capacity, queue = build_capacity(settings)
    return Node(
        id=node_id,
        data=data,
        boot_id=boot_id(),
        version=_version(),
        journal=Journal(data / "journal.db"),
        capacity=capacity,
        queue=queue,
        backends=backends,
        images=images,
        metrics=NodeMetrics(),
        room=room,
        limits=limits
        or Limits(
            calls_max=settings["calls_max"],
            calls_queue_max=settings["calls_queue_max"],
            lanes_max=settings["lanes_max"],
        ),
        failpoints=Failpoints(settings["failpoint"]),
        mount_roots=tuple(settings["mount_roots"]),
    )


def _version() -> str:
    try:
        return metadata.version("nomad-dsec")
    except metadata.PackageNotFoundError:  # run from a tree that is not installed
        return "0"


async def assemble(node: Node) -> Assembled:
    """Wire the parts, recover what the journal tells of, start the background loops."""
    door = Door(node)
    supervisor = Supervisor(node, door)
    rows = node.journal.open()
    for name in node.backends:
        await supervisor.fingerprint(name)
    await Recovery(node, door, supervisor).run(rows)
    supervisor.drain(on=bool(node.journal.facts().get("draining")), deadline_s=None)
    supervisor.run()
    creator, verbs, execs = Creator(node, door, supervisor), Verbs(node, door, supervisor), Execs(node)
    tasks, grants = Tasks(node, door, creator, verbs, execs), Grants(node, door)
    follower = Follower(node, door, execs, tasks)
    await grants.recover()
    await follower.recover()
    lanes = Lanes(node)
    calls = CallTasks(node, lanes)
    await calls.recover()
    kept: dict[str, Kept] = {"task": tasks, "grant": grants, "call": calls}
    node.room.spawn("sweep tasks", TaskSweep(node.clock, tasks, kept).run_forever())
    fingerprint = Fingerprint(node, supervisor, lanes)
    node.room.spawn("cull lanes", lanes.cull())
    routes = Routes(node, creator, verbs, execs, Files(execs), fingerprint, supervisor, FncallRoutes(lanes))
    return Assembled(
        node=node,
        door=door,
        supervisor=supervisor,
        creator=creator,
        verbs=verbs,
        execs=execs,
        fingerprint=fingerprint,
        routes=routes,
        lanes=lanes,
        task_routes=TaskRoutes(tasks, grants, calls),
        tasks=tasks,
        grants=grants,
    )
