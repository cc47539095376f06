"""The ranks of one replica that scores with models divided by tp: this process and children of it, one a GPU.

    replica, rank 0 --(work, arguments), through a pipe--> rank 1, rank 2, ...     all run work(member, *arguments)
                    <------- "" or what went wrong -------
Work is a function at the head of a module. Between two works the children wait, so a call may end between any two. A
child ends with its pipe, and when it fails; then all are given up, with what they held, and started anew for the next.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and documented
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from functions.call.function import FatalError, RetryableError
from functions.models.parked import HostMemory, tensors_in
from functions.models.pretrained import (
    empty_causal_lm,
    empty_critic,
    load_causal_lm,
    load_critic,
    load_reward_model,
    own_tensors,
)
from functions.models.tensor_parallel import local, split_layers
from functions.weights.files import decode_header, weight_files

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["causal", "critic", "reward"]
LOADS: dict[Kind, tuple[Callable[..., PreTrainedModel], Callable[..., PreTrainedModel]]] = {
    "causal": (load_causal_lm, empty_causal_lm), "critic": (load_critic, empty_critic),
    "reward": (load_reward_model, empty_critic),
}  # fmt: skip
"""Whole, and without weights."""
START_S = 300.0
"""Most that the ranks take to meet: each has its libraries to load."""


@dataclass
class Member:
    """One rank, and what it holds."""

    device: torch.device
    mesh: DeviceMesh | None = None
    """Of more than one rank."""
    held: dict[Any, Any] = field(default_factory=dict)
    host: HostMemory = field(default_factory=HostMemory)

    def load(self, kind: Kind, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
        """The model of `directory`, of several ranks this one's part of it. ValueError where there is none."""
        whole, empty = LOADS[kind]
        if self.mesh is None:
            return whole(directory, dtype=dtype, device=str(self.device)).requires_grad_(False)
        model: Any = empty(directory, dtype=dtype)
        stored = {tensor.name: file for file in weight_files(directory) for tensor in decode_header(file)}
        if own_tensors(model).keys() <= stored.keys():
            split_layers(model, self.mesh, last=True)
            model._apply(lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t.to(self.device))
            model.tie_weights()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    self._read(stored[name], name, parameter)
        else:  # stored in another form (experts apart), or a critic's score is not: whole on the host first
            model = whole(directory, dtype=dtype, device="cpu")
            split_layers(model, self.mesh, last=True)
        part: PreTrainedModel = model.to(self.device).requires_grad_(False)
        return part

    def _read(self, file: Path, name: str, parameter: Tensor) -> None:
        """This rank's part of a tensor, and no other byte of it."""
        assert self.mesh is not None, "of several"
        own: list[Any] = [slice(None)] * parameter.ndim
        if isinstance(parameter, DTensor) and isinstance(placement := parameter.placements[0], Shard):
            each = parameter.shape[placement.dim] // self.mesh.size()
            own[placement.dim] = slice(each * self.mesh.get_local_rank(), each * (self.mesh.get_local_rank() + 1))
        with safe_open(file, "pt") as tensors:
            local(parameter).copy_(tensors.get_slice(name)[tuple(own)])


class Team:
    """`team(work, ...)` is work(member, ...) on every rank, and this process's result of it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self.member = Member(device)
        self._children: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def __call__(self, work: Callable[Concatenate[Member, P], T], *args: P.args, **named: P.kwargs) -> T:
        """RetryableError where another rank fails; what this one raises."""
        if self._size == 1:
            return work(self.member, *args, **named)
        try:
            if self.member.mesh is None:
                self._start()
            for _, pipe in self._children:
                pipe.send_bytes(pickle.dumps((work, args, named)))
            result = work(self.member, *args, **named)
            for _, pipe in self._children:
                if why := pipe.recv_bytes().decode():
                    raise RetryableError(why)
        except (ValueError, FatalError, RetryableError):
            self.close()
            raise
        except Exception as error:  # a collective that broke, most often: the peer may have said why
            said = [_said(pipe) for _, pipe in self._children]
            self.close()
            raise RetryableError(next(filter(None, said), f"a rank of {self._size} is lost: {error!r}")) from error
        return result

    def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port, threads = listener.getsockname()[1], torch.get_num_threads()
        for rank in range(1, self._size):
            ours, theirs = Pipe()
            told = [str(word) for word in (theirs.fileno(), rank, self._size, port, self._device.type, threads)]
            child = subprocess.Popen([sys.executable, "-m", __name__, *told], pass_fds=[theirs.fileno()])
            theirs.close()
            self._children.append((child, ours))
        self.member = joined(0, self._size, port, self._device.type, listener.detach())

    def close(self) -> None:
        """Ends the children; what all held is gone."""
        for child, pipe in self._children:
            child.kill()
            child.wait()
            pipe.close()
        self._children, self.member = [], Member(self._device)
        if self._size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _said(pipe: Connection) -> str:
    with suppress(OSError, EOFError):
        return pipe.recv_bytes().decode() if pipe.poll() else ""
    return ""


def joined(rank: int, size: int, port: int, kind: str, listener: int | None = None) -> Member:
    """This process as a rank, when all are there; rank 0 listens."""
    store = TCPStore(
        "127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=START_S), wait_for_workers=False,
        master_listen_fd=listener,
    )  # fmt: skip
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size,
        timeout=timedelta(seconds=START_S),
    )  # fmt: skip
    return Member(device, init_device_mesh(kind, (size,), mesh_dim_names=("tp",)))


@torch.no_grad()
def park(member: Member) -> None:
    found = tensors_in(list(member.held.values()))
    member.host.park(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found)


def unpark(member: Member) -> None:
    member.host.unpark()


def main() -> None:
    fd, rank, size, port, kind, threads = sys.argv[1:]
    pipe = Connection(int(fd))
    torch.set_num_threads(int(threads))
    member = joined(int(rank), int(size), int(port), kind)
    with suppress(EOFError, OSError):
        while True:
            work, args, named = pickle.loads(pipe.recv_bytes())
            try:
                work(member, *args, **named)
                pipe.send_bytes(b"")
            except Exception as error:
                pipe.send_bytes(f"rank {rank} of {size}: {type(error).__name__}: {error}".encode())
                break
    os._exit(0)  # rank 0 is gone: its peers in a collective are not waited for


if __name__ == "__main__":
    main()
