"""A gang: N train calls that make one step together, each a rank. All of them commit, or none.

    rank 0      listens, puts its address under gang/<id>/<attempt>/rendezvous
    others      wait for that key, connect                        all: wait for each other, then form a process group
    all         train (parallel.py); rank 0 publishes, the others wait for the manifest and answer with it
    a failure   is put under gang/<id>/<attempt>/failed by the first that fails; its peers, whose collectives break
                with the closed connections, end with the same error

The version that is published follows from the gang's id alone: a repeated gang finds it and nobody trains again. Every
attempt has a name of its own, so that no rank meets one of an earlier attempt.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and documented
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functions.base.wire import Json
from functions.call.function import Cancelled, Context, FatalError, RetryableError
from functions.call.parallel import AXES, DATA_PARALLEL, Parallel
from functions.call.params import parse
from functions.exchange.base import Exchange, ExchangeError, NotFound, Unavailable

LOOK_S = 1.0
"""How often a waiting rank looks whether it is still wanted."""
CONNECT_S = 60.0
"""Most that it takes to reach rank 0, once it has said where it is, and to connect all with all."""
PEER_S = 600.0
"""Most that a rank waits in one collective. A peer that dies is noticed at once, one that hangs by the orchestrator."""
REASON_S = 0.2
"""How long a rank whose collective broke waits for its peer to say why: it has said it before its connections closed,
and one that was killed never will."""
KEYS_LIFETIME_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class GangParams:
    """`gang` in a call's params."""

    id: str
    """The same for all ranks and attempts: what the published version is named after."""
    attempt: str
    """The same for all ranks of one attempt, never used before."""
    size: int
    rank: int
    parallel: Parallel = DATA_PARALLEL

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of a gang of {self.size}")
        self.parallel.dp(self.size)

    @property
    def prefix(self) -> str:
        return f"gang/{self.id}/{self.attempt}/"

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> GangParams | None:
        """Raises FatalError naming the key."""
        return parse(cls, params["gang"], "params.gang") if "gang" in params else None


@dataclass(frozen=True)
class Ranks:
    """The ranks of a step, seen from one of them; ALONE for a step that one replica makes."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Of AXES (functions/call/parallel.py); every axis is there, of size 1 where nothing is shared along it."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def place(self, axis: str) -> int:
        """Where this rank stands along `axis`,"""
        coordinate = (
            None if self.mesh is None else self.mesh.get_coordinate()
        )  # a group's ranks are sorted: not its own
        return 0 if coordinate is None else coordinate[AXES.index(axis)]

    def count(self, axis: str) -> int:
        """and of how many."""
        return 1 if self.mesh is None else self.mesh.size(AXES.index(axis))  # `mesh[axis]` makes a mesh: 1 ms

    @property
    def shard(self) -> tuple[int, int]:
        """Which of how many parts FSDP2 gives this rank of a layer: they are dealt over dp and cp."""
        return self.place("dp") * self.count("cp") + self.place("cp"), self.count("dp") * self.count("cp")

    @property
    def writes(self) -> bool:
        """Whether it publishes what all ranks of its stage have alike."""
        return self.place("dp") == self.place("cp") == self.place("tp") == 0

    @property
    def _ahead(self) -> bool:
        """Whether stages follow each other as ranks do."""
        return self.mesh is None or int(self.mesh.mesh.flatten()[0]) == 0

    def turned(self) -> Ranks:
        """The same ranks with the stages of a pipeline the other way around. All ranks call it together."""
        assert self.mesh is not None, "of a gang"
        found = replace(self, mesh=DeviceMesh(self.device.type, self.mesh.mesh.flip(0), mesh_dim_names=AXES))
        found.sum(torch.zeros(1))  # connects: gloo receives from no peer that it has not met in a collective
        return found

    def in_mesh(self, told: list[Json]) -> list[Json]:
        """What each rank said, in the order of stages, whichever way a pipeline runs."""
        return told if self.mesh is None else [told[rank] for rank in self.mesh.mesh.flatten().tolist()]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over dp and the stages of a pipeline, on the CPU."""
        if self.mesh is None:
            return tensor
        moved = tensor.to(self.device)
        for axis in ("dp", "pp"):
            dist.all_reduce(moved, group=self.mesh.get_group(axis))
        return moved.cpu()

    def gather(self, value: Json, axis: str | None = None) -> list[Json]:
        """Each rank's `value`, in their order; with `axis` of those along it: along dp, those of the last stage."""
        if self.mesh is None:
            return [value]
        found = [json.loads(part) for part in self.gather_bytes(json.dumps(value).encode(), axis)]
        if axis == "dp" and self.count("pp") > 1:
            stages = self.gather({"found": found}, "pp")  # by their ranks
            return list(stages[-1 if self._ahead else 0]["found"])
        return found

    def gather_bytes(self, value: bytes, axis: str | None = None) -> list[bytes]:
        """As `gather`, of a gang."""
        group = self._group(axis)
        place, size = dist.get_rank(group), dist.get_world_size(group)
        sizes = torch.zeros(size, dtype=torch.int64, device=self.device)
        sizes[place] = len(value)
        dist.all_reduce(sizes, group=group)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        if value:
            padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        return [part[:n].cpu().numpy().tobytes() for part, n in zip(parts, sizes.tolist(), strict=True)]

    def swap(self, sent: Tensor, to: list[int], of: list[int], axis: str | None = None) -> Tensor:
        """Elements `to` each rank, and `of` each; of a gang."""
        received = sent.new_empty(sum(of))
        dist.all_to_all_single(received, sent, of, to, group=self._group(axis))
        return received

    def _group(self, axis: str | None) -> dist.ProcessGroup | None:
        """None: all ranks."""
        assert self.mesh is not None, "of a gang"
        return None if axis is None else self.mesh.get_group(axis)


ALONE = Ranks()


@contextmanager
def meet(
    gang: GangParams, device: torch.device, context: Context, published: Callable[[], bool]
) -> Iterator[Ranks | None]:
    """The gang, for as long as the block runs; None when the version has been `published` before all were there.

    What goes wrong in the block goes wrong for all ranks: FatalError where one of them met one, else RetryableError.
    """
    exchange = context.exchange
    try:
        store = _rendezvous(gang, context, published)
        if store is None:
            yield None
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=gang.rank, world_size=gang.size, timeout=timedelta(seconds=PEER_S)
        )
        mesh = init_device_mesh(device.type, gang.parallel.shape(gang.size), mesh_dim_names=AXES)
        ranks = Ranks(gang.rank, gang.size, mesh, device)
        ranks.gather({})  # NCCL wants all ranks in the first exchange; parts.py has some between two of them
        yield ranks
    except FatalError as error:
        _report(exchange, gang, "fatal", str(error))
        raise
    except (Cancelled, GeneratorExit, RetryableError, ExchangeError) as error:
        lost = error.key if isinstance(error, NotFound) else ""
        _report(exchange, gang, "retryable", f"{type(error).__name__} {error}".rstrip(), lost)
        raise
    except Exception as error:
        raise _reason(exchange, gang, error) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def await_value(key: str, context: Context) -> None:
    """Until another rank has put a value under `key` in the durable exchange."""
    while not context.exchange.durable.wait(key, LOOK_S):
        context.check()


def _rendezvous(gang: GangParams, context: Context, published: Callable[[], bool]) -> TCPStore | None:
    """The store in which all ranks are registered; None when they need not meet any more."""
    key, timeout = f"{gang.prefix}rendezvous", timedelta(seconds=CONNECT_S)
    if gang.rank == 0:
        listener = socket.create_server((_own_address(), 0))
        host, port = listener.getsockname()[:2]
        store = TCPStore(
            host, port, gang.size, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        address = json.dumps({"host": host, "port": port}).encode()
        context.exchange.put_if_absent(key, address, lifetime_s=KEYS_LIFETIME_S)  # outlives a Redis that is emptied
    else:
        while not context.exchange.wait(key, LOOK_S):
            context.check()
            if published():
                return None
        address = json.loads(context.exchange.get(key))
        store = TCPStore(
            address["host"], address["port"], gang.size, is_master=False, timeout=timeout, wait_for_workers=False
        )
    names = [f"rank-{rank}" for rank in range(gang.size)]
    store.set(names[gang.rank], "here")
    while True:
        try:
            store.wait(names, timedelta(seconds=LOOK_S))
            return store
        except dist.DistStoreError:  # not all are there yet
            context.check()
            if published():
                return None


def _own_address() -> str:
    """Where peers reach this process: what its host name stands for (a pod's address), or this machine alone."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _report(exchange: Exchange, gang: GangParams, kind: str, message: str, lost: str = "") -> None:
    """Tells the other ranks why, where nobody has failed before and the exchange can be reached. `lost`: the key of an
    input that is gone."""
    value = json.dumps({"kind": kind, "message": message, "rank": gang.rank, "lost": lost}).encode()
    with contextlib.suppress(ExchangeError):
        exchange.put_if_absent(f"{gang.prefix}failed", value, lifetime_s=KEYS_LIFETIME_S)


def _reason(exchange: Exchange, gang: GangParams, error: Exception) -> Exception:
    """What a rank ends with whose work broke off with `error`: the peer's reason, where one has said it; a peer that
    cannot reach the exchange says nothing, and neither can this one."""
    key, first = f"{gang.prefix}failed", str(error).strip().splitlines()[0] if str(error).strip() else ""
    try:
        if exchange.wait(key, REASON_S):
            told = json.loads(exchange.get(key))
            message = f"rank {told['rank']} failed: {told['message']}"
            if told["kind"] == "fatal":
                return FatalError(told["message"])
            return NotFound(message, told["lost"]) if told["lost"] else RetryableError(message)
    except Unavailable as away:
        return away
    except ExchangeError:
        pass
    message = f"rank {gang.rank} of {gang.size}: {type(error).__name__}: {first}"
    _report(exchange, gang, "retryable", message)
    return RetryableError(message)
