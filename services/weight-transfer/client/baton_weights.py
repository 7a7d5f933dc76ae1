"""Gives a running Baton cluster new weights from a PyTorch trainer: one file, no dependency but torch.

    updater = WeightUpdater("http://router:8002", folder="/models/updates", config="/models/base")
    for step in range(1000):
        train()
        if step % 100 == 0:
            updater.push(model.state_dict(), label=f"step {step}")

With a trainer on the host of all nodes, and weights on GPUs, no byte passes through files or the host:

    updater = WeightUpdater("http://router:8002", transport="ipc", socket="/run/baton/trainer.sock")
    updater.push(model.state_dict())

With transport "nccl" the nodes may be on other hosts, but not on the trainer's GPU:

    updater = WeightUpdater("http://router:8002", transport="nccl", host="10.0.0.7")

With ipc, the nodes read chunks in the memory of the trainer's GPU (CUDA IPC). With nccl, one broadcast sends each chunk to all nodes. With both,
the nodes compare digests of what arrived with the trainer's. Matrices have the element type of the nodes
(model.dtype). Do not change the weights before `push` or `prepare` returns.

With transport "disk", `folder` must have the same path on the trainer and on every node. `push` writes a safetensors model there, lets every
node prepare it, and commits it on all nodes or on none. Requests continue meanwhile. `prepare` and `commit` are the two
halves of `push`, for a trainer that does other work in between.

A trainer whose GPUs do not hold the whole state gathers one tensor after the other, with transport "disk":

    updater.push(((name, parameter.full_tensor()) for name, parameter in model.named_parameters()), label="step 200")

`full_tensor` is a collective: one rank calls `push`, and the other ranks call `full_tensor` of the same parameters in the same order.

A state dict has the names of Hugging Face. Values are torch tensors, or tuples (dtype, shape, bytes) with dtype "F32",
"F16", "BF16" or "F8_E4M3". FP8 needs transport "disk": beside each FP8 matrix the state dict has its scales, and `config` is
the folder of a checkpoint in FP8, whose config.json names the layout of the scales.
"""

import contextlib
import ctypes
import hashlib
import http.client
import json
import os
import secrets
import select
import shutil
import socket as sockets
import struct
import threading
import time
import urllib.error
import urllib.request

DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float8_e4m3fn": "F8_E4M3"}
COPIED = ("config.json", "generation_config.json")
# Maximum size of a file of weights, unless one tensor is larger. The host holds the tensors of one file.
SHARD_BYTES = 1 << 30
POLL_SECONDS = 0.05
# Updates from GPU to GPU take milliseconds.
POLL_SECONDS_GPU = 0.005
COMMITTED = ("committed",)
PREPARED = ("prepared", "committing", "committed")
# Time beyond an update's time-out: the router commits for up to 60 s.
GRACE_SECONDS = 90
# The constants of kernels/src/digest.rs as signed 64-bit integers.
STEP, *MULTIPLIERS = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class UpdateError(Exception):
    """The cluster did not take up the weights; it serves the old ones, except after an `OutcomeUnknown`."""


class OutcomeUnknown(UpdateError):
    """The router did not answer or has restarted, or the update did not end in time. The cluster may have the new weights."""


class WeightUpdater:
    def __init__(self, admin, folder=None, config=None, api_key=None, model=None, timeout=300, keep=2,
                 in_flight="recompute", transport="disk", socket=None, host=None, chunk_bytes=256 << 20, buffers=2,
                 nccl_max_ctas=None):
        """admin: URL of router.admin. in_flight: what becomes of requests in flight at a commit: recompute, keep_kv, wait
        or abort. transport: disk, ipc or nccl.
        disk: folder: place of the updates. config: folder with the model's config.json. keep: updates left in the folder.
        ipc: socket: path of the Unix socket, the same on every node. Each node takes `buffers` times `chunk_bytes` of the
        trainer's GPU memory, which is kept for the next update.
        nccl: host: address of this process that the nodes reach. The first update connects the trainer and the nodes, which
        takes a second; later updates use the same communicator. The trainer and each node take `buffers` times
        `chunk_bytes`, on nodes at most weights.buffers times weights.chunk_bytes. nccl_max_ctas: limits the SMs that a broadcast
        takes on each GPU; None: NCCL decides."""
        self.admin, self.config = admin.rstrip("/"), config
        self.api_key, self.model, self.timeout, self.keep = api_key, model, timeout, max(2, keep)
        self.in_flight, self.transport = in_flight, transport
        needed = {"disk": {"folder": folder, "config": config}, "ipc": {"socket": socket}, "nccl": {"host": host}}
        if transport not in needed:
            raise UpdateError(f"invalid transport: {transport!r}; expected one of {', '.join(needed)}")
        for name, value in needed[transport].items():
            if value is None:
                raise UpdateError(f"missing {name}; expected it with transport {transport}")
        if transport == "disk":
            self.folder = os.path.abspath(folder)
            os.makedirs(self.folder, exist_ok=True)
        elif transport == "ipc":
            self.memory = GpuChunks(os.path.abspath(socket), chunk_bytes, buffers)
        else:
            self.sender = Sender(host, chunk_bytes, buffers, nccl_max_ctas)

    def close(self):
        """Frees the chunk buffers, and with nccl ends the communicator. Call it when no update runs. Later updates create both again."""
        if self.transport == "ipc":
            self.memory.close()
        elif self.transport == "nccl":
            self.sender.close()

    def push(self, state_dict, label=""):
        """Sends, prepares and commits the weights: a dict, or with transport disk any iterable of names and values, which is
        read once, in order. Returns the router's report of the update."""
        return self.ended(self.prepare(state_dict, label, commits=True))

    def prepare(self, state_dict, label="", commits=False):
        """Returns the update's id once every node holds the weights beside those in use. commits: the router commits then."""
        if self.transport == "ipc":
            with self.memory.offered(state_dict):
                return self.wait(self.begin(self.memory.socket, label, commits)["id"], PREPARED)["id"]
        if self.transport == "nccl":
            return self.broadcast(state_dict, label, commits)
        return self.wait(self.begin(self.write(state_dict), label, commits)["id"], PREPARED)["id"]

    def broadcast(self, state_dict, label, commits):
        with self.sender.listening(state_dict) as sending:
            update = self.begin(sending.address, label, commits)
            try:
                sending.send(len(update["nodes"]))
            except Exception as error:
                # The nodes fail as soon as they lose their connections. Most of them name the cause.
                sending.close()
                try:
                    # Nodes that have received everything do not need the trainer.
                    return self.wait(update["id"], PREPARED)["id"]
                except UpdateError as reason:
                    raise type(reason)(f"{reason}: {error}") from error
            return self.wait(update["id"], PREPARED)["id"]

    def begin(self, path, label, commits):
        """Returns the router's report of the update."""
        body = {"path": path, "label": label, "timeout_s": self.timeout, "in_flight": self.in_flight, "commit": commits}
        if self.transport != "disk":
            body["transport"] = self.transport
        if self.model is not None:
            body["model"] = self.model
        update = self.call("POST", "/begin", body)
        if update is None or "id" not in update:
            raise UpdateError(f"the answer of {self.admin} has no update.id; expected the address of router.admin")
        return update

    def commit(self, update_id):
        self.call("POST", f"/{update_id}/commit")
        return self.ended(update_id)

    def ended(self, update_id):
        update = self.wait(update_id, COMMITTED)
        if self.transport == "disk":
            self.remove_old(update["path"])
        return update

    def abort(self, update_id):
        self.call("POST", f"/{update_id}/abort")

    def write(self, state_dict):
        """Writes a model under a new name and returns its path. A reader never sees an incomplete model."""
        path = os.path.join(self.folder, f"update-{time.time_ns()}")
        partial = path + ".partial"
        os.mkdir(partial)
        for name in COPIED:
            source = os.path.join(self.config, name)
            if os.path.exists(source):
                shutil.copy(source, partial)
        write_shards(partial, state_dict.items() if hasattr(state_dict, "items") else state_dict)
        os.rename(partial, path)
        return path

    def wait(self, update_id, phases):
        deadline = time.monotonic() + self.timeout + GRACE_SECONDS
        cause = ""
        while time.monotonic() < deadline:
            try:
                # With the id: the update of another model may have begun since.
                update = self.call("GET", f"?id={update_id}")
            except OutcomeUnknown as error:
                # The update continues while the router does not answer.
                cause = f": {error}"
                time.sleep(POLL_SECONDS)
                continue
            cause = ""
            if update is None or update.get("id") != update_id:
                # A router that restarted knows no update, but the nodes may have committed it.
                raise OutcomeUnknown(f"the router does not know update {update_id}: {update}")
            if update.get("phase") in phases:
                return update
            if update.get("phase") == "aborted":
                raise UpdateError(f"update {update_id} was aborted: {update.get('reason')}")
            time.sleep(POLL_SECONDS if self.transport == "disk" else POLL_SECONDS_GPU)
        raise OutcomeUnknown(f"update {update_id} is not {phases[0]} within {self.timeout + GRACE_SECONDS} s{cause}")

    def remove_old(self, committed):
        """Keeps the committed weights, which nodes that missed the update still read, and the newest others."""
        names = sorted(name for name in os.listdir(self.folder) if name.startswith("update-"))
        for name in names[: -self.keep]:
            path = os.path.join(self.folder, name)
            if path != committed:
                shutil.rmtree(path, ignore_errors=True)

    def call(self, method, path, body=None):
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.admin}/v1/weights{path}"
        request = urllib.request.Request(url, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            text, is_rejected = "", error.code < 500
            with contextlib.suppress(OSError, http.client.HTTPException):
                text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text, is_rejected = json.loads(text)["error"]["message"], True
            # A rejected poll says nothing about the update. The error of a proxy does not say what the router has done.
            kind = UpdateError if is_rejected and method != "GET" else OutcomeUnknown
            raise kind(f"{method} {url}: {error.code} {text}") from None
        except (OSError, http.client.HTTPException) as error:
            raise OutcomeUnknown(f"cannot reach the router's admin API: {method} {url}: {error}") from None
        try:
            return json.loads(text)["update"]
        except (ValueError, KeyError, TypeError):
            shown = text[:200].decode(errors="replace")
            kind = OutcomeUnknown if method == "GET" else UpdateError
            raise kind(f"cannot read the answer of {url}: {shown!r}; expected JSON with the field update") from None


class Chunks:
    """A state dict on GPUs, cut into chunks. The digests are computed during the transfer."""

    def __init__(self, state_dict, chunk_bytes):
        if not hasattr(state_dict, "items"):
            raise UpdateError("the weights are no state dict; expected one, or an iterable with transport disk")
        import torch

        self.tensors, self.sources = [], []
        for name, value in state_dict.items():
            if isinstance(value, tuple) or not value.is_cuda:
                raise UpdateError(f"tensor {name} is not on a GPU; expected a torch tensor on one")
            dtype, shape, _ = describe(name, value)
            self.tensors.append({"name": name, "dtype": dtype, "shape": shape})
            self.sources.append(value.detach().contiguous().reshape(-1).view(torch.uint8))
        if not self.sources:
            raise UpdateError("the state dict is empty; expected at least one tensor")
        self.device = self.sources[0].device
        self.chunks = cut([source.numel() for source in self.sources], chunk_bytes)
        self.plan = plan_hash(self.tensors, self.chunks)
        # Ends of the caller's current streams: copies wait for them on the GPU, and for no other stream.
        self.written = [torch.cuda.current_stream(device).record_event() for device in {source.device for source in self.sources}]
        self.digests = Digests(self.sources)

    def pack(self, index, buffer):
        """Enqueues the copies of a chunk's bytes to the front of a buffer. Returns their number."""
        import torch

        for event in self.written:
            torch.cuda.current_stream(self.device).wait_event(event)
        end = 0
        for tensor, begin, size in self.chunks[index]:
            buffer[end : end + size].copy_(self.sources[tensor][begin : begin + size], non_blocking=True)
            end += size
        return end


class Digests:
    """Digests of whole tensors by the formula of kernels/src/digest.rs. Nodes compare them with those of the received tensors."""

    def __init__(self, sources):
        """Launches the work before the update begins, because launches hold Python's global lock, which would delay chunks.
        Uses the current streams, on which nothing else runs: PyTorch's allocator would keep memory of other streams for them."""
        import torch

        self.count, self.enqueued = len(sources), []
        for device in {source.device for source in sources}:
            with torch.cuda.device(device):
                terms_of, piece_bytes = fastest_terms(device)
                places = torch.arange(piece_bytes // 8, device=device)
                sums = [(tensor, terms_of(words, places[: len(words)], first=first).sum())
                        for tensor, source in enumerate(sources) if source.device == device
                        for first, words in words_of(source, piece_bytes)]
                owners, sums = zip(*sums)
                sums, done = torch.stack(sums), torch.cuda.Event()
                done.record()
                self.enqueued.append((owners, sums, done))

    def read(self):
        """Waits for the GPUs. Returns the digests as nodes read them."""
        digests = [0] * self.count
        for owners, sums, done in self.enqueued:
            done.synchronize()
            for owner, part in zip(owners, sums.tolist()):
                digests[owner] += part
        return struct.pack(f"<{self.count}Q", *(digest % (1 << 64) for digest in digests))


def words_of(source, piece_bytes):
    """Yields each piece of a tensor's bytes as the place of its first word, and its 8-byte words."""
    import torch

    for begin in range(0, max(source.numel(), 1), piece_bytes):
        piece = source[begin : begin + piece_bytes]
        if piece.numel() % 8 or piece.storage_offset() % 8 or piece.data_ptr() % 8:
            # A copy, with zeros at the end of the last word.
            words = torch.zeros(-(-piece.numel() // 8), dtype=torch.int64, device=piece.device)
            words.view(torch.uint8)[: piece.numel()].copy_(piece)
        else:
            words = piece.view(torch.int64)
        yield begin // 8, words


def terms(words, places, first=0):
    """Returns the terms of words at the places from `first` on, for tensors of int64 or for integers, modulo 2 ** 64."""
    x = words + (places + (first + 1)) * STEP
    x = (x ^ shifted(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shifted(x, 27)) * MULTIPLIERS[1]
    return x ^ shifted(x, 31)


def shifted(words, bits):
    """Shifts unsigned words of 64 bits to the right."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def fastest_terms(device):
    """Returns `terms` as one kernel, and the size of a piece in bytes. Where PyTorch compiles no kernels, returns the operations above,
    which take several times as long, and memory for four pieces instead of two."""
    import torch

    step, *multipliers = (f"{number % (1 << 64)}ull" for number in (STEP, *MULTIPLIERS))
    code = f"""template <typename T> T digest_terms(T word, T place, T first) {{
        unsigned long long x = (unsigned long long)word + (unsigned long long)(place + first + 1) * {step};
        x = (x ^ (x >> 30)) * {multipliers[0]};
        x = (x ^ (x >> 27)) * {multipliers[1]};
        return (T)(x ^ (x >> 31));
    }}"""
    try:
        compiled, word = torch.cuda.jiterator._create_jit_fn(code, first=0), torch.zeros(1, dtype=torch.int64, device=device)
        compiled(word, word)
        return compiled, 64 << 20
    except (AttributeError, RuntimeError):
        return terms, 32 << 20


class GpuChunks:
    """Lets nodes of this host read a state dict in the memory of this process's GPU. Each node has a connection to the
    socket, a thread, and buffers of its own. services/node/src/weights/trainer.rs describes the messages."""

    # Time for nodes to end their copies after an update was prepared or aborted.
    CLOSE_SECONDS = 10

    def __init__(self, socket, chunk_bytes, buffers):
        self.socket, self.chunk_bytes, self.buffer_count = socket, chunk_bytes, buffers
        self.lock, self.free = threading.Lock(), []

    def offered(self, state_dict):
        return Offer(self, state_dict)

    def take_buffers(self, device):
        with self.lock:
            for index, buffers in enumerate(self.free):
                if buffers[0].device == device:
                    return self.free.pop(index)
        buffers = []
        try:
            for _ in range(self.buffer_count):
                buffers.append(GpuBuffer(device, self.chunk_bytes))
        except BaseException:
            free_all(buffers)
            raise
        return buffers

    def give_buffers(self, buffers):
        with self.lock:
            self.free.append(buffers)

    def close(self):
        with self.lock:
            while self.free:
                free_all(self.free.pop())


class Offer:
    """The chunks of one state dict, for as long as nodes may read them."""

    # Number that requests the digests instead of a chunk.
    DIGESTS = (1 << 64) - 1

    def __init__(self, memory, state_dict):
        self.memory, self.threads, self.connections, self.error = memory, [], [], None
        self.weights = Chunks(state_dict, memory.chunk_bytes)

    def __enter__(self):
        path = self.memory.socket
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path):
            os.unlink(path)
        self.listener = sockets.socket(sockets.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.accepting = threading.Thread(target=self.accept, daemon=True)
        self.accepting.start()
        return self

    def __exit__(self, kind, error, trace):
        """Waits until every node has closed its connection: it then reads this memory no more."""
        self.listener.shutdown(sockets.SHUT_RDWR)
        self.accepting.join()
        self.listener.close()
        if os.path.exists(self.memory.socket):
            os.unlink(self.memory.socket)
        deadline = time.monotonic() + GpuChunks.CLOSE_SECONDS
        for thread, connection in zip(self.threads, self.connections):
            thread.join(max(0, deadline - time.monotonic()))
            if thread.is_alive():
                # The thread may close the connection at this moment.
                with contextlib.suppress(OSError):
                    connection.shutdown(sockets.SHUT_RDWR)
                thread.join()
        if self.error is not None and isinstance(error, UpdateError):
            raise type(error)(f"{error}: {self.error}") from self.error

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                # `__exit__` has shut the listener down.
                return
            thread = threading.Thread(target=self.serve, args=(connection,), daemon=True)
            self.connections.append(connection)
            self.threads.append(thread)
            thread.start()

    def serve(self, connection):
        import torch

        buffers = None
        try:
            torch.cuda.set_device(self.weights.device)
            buffers = self.memory.take_buffers(self.weights.device)
            declaration = {
                "chunk_bytes": self.memory.chunk_bytes,
                "plan": self.weights.plan,
                "mapped": [{"gpu": buffer.gpu, "handle": buffer.handle} for buffer in buffers],
                "tensors": self.weights.tensors,
            }
            connection.sendall(json.dumps(declaration).encode() + b"\n")
            stream = torch.cuda.Stream(self.weights.device)
            with torch.cuda.stream(stream):
                while request := receive(connection, 8):
                    (index,) = struct.unpack("<Q", request)
                    if index == self.DIGESTS:
                        connection.sendall(self.weights.digests.read())
                        continue
                    size = self.weights.pack(index, buffers[index % len(buffers)].bytes)
                    stream.synchronize()
                    connection.sendall(struct.pack("<QQ", index, size))
        except OSError:
            # The node has ended. The router tells why.
            pass
        except Exception as error:
            self.error = error
        finally:
            connection.close()
            if buffers is not None:
                self.memory.give_buffers(buffers)


class GpuBuffer:
    """Memory that other processes of the host may map. PyTorch's own memory may be of a kind that they cannot map."""

    def __init__(self, device, size):
        import torch

        self.gpu, self.device = uuid_of(device), device
        self.address, handle = ctypes.c_uint64(), (ctypes.c_ubyte * 64)()
        cuda = ctypes.CDLL("libcuda.so.1")
        check_cuda(cuda, device, ("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(size)))
        try:
            check_cuda(cuda, device, ("cuIpcGetMemHandle", ctypes.byref(handle), self.address))
            self.handle = bytes(handle).hex()
            self.__cuda_array_interface__ = {
                "shape": (size,), "typestr": "|u1", "data": (self.address.value, False), "version": 3,
            }
            self.bytes = torch.as_tensor(self, device=device)
        except BaseException:
            self.free()
            raise

    def free(self):
        make_current(self.device)
        self.bytes = None
        check_cuda(ctypes.CDLL("libcuda.so.1"), self.device, ("cuMemFree_v2", self.address))


def keep_alive(connection):
    """Lets the connection fail 25 s after the peer's host or the network has gone."""
    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    for option, value in ((sockets.TCP_KEEPIDLE, 10), (sockets.TCP_KEEPINTVL, 5), (sockets.TCP_KEEPCNT, 3)):
        connection.setsockopt(sockets.IPPROTO_TCP, option, value)


def free_all(buffers):
    for buffer in buffers:
        buffer.free()


class Sender:
    """Broadcasts state dicts to the GPUs of nodes by NCCL.

    The communicator and the connections of its nodes serve one update after the other, until an update fails or the
    nodes change."""

    def __init__(self, host, chunk_bytes, buffers, max_ctas):
        self.host, self.chunk_bytes, self.buffer_count, self.max_ctas = host, chunk_bytes, buffers, max_ctas
        self.listener, self.token, self.buffers = None, secrets.token_hex(16), []
        # The connections are in the order of the ranks from 1 on.
        self.nccl, self.connections, self.ending = None, [], None

    def address(self):
        """Returns the address at which nodes connect. It stays the same until an update fails, so nodes recognize their trainer."""
        if self.listener is None:
            self.listener = sockets.create_server((self.host, 0))
        return f"{self.host}:{self.listener.getsockname()[1]}/{self.token}"

    def take_buffers(self, device):
        import torch

        if not self.buffers or self.buffers[0].device != device:
            size, count = self.chunk_bytes, self.buffer_count
            self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        return self.buffers

    def leave(self):
        """Closes the connections, and ends the communicator beside other work, because this takes half a second."""
        for connection in self.connections:
            connection.close()
        nccl, self.nccl, self.connections = self.nccl, None, []
        if nccl is not None:
            self.join_ending()
            self.ending = threading.Thread(target=nccl.abort)
            self.ending.start()

    def join_ending(self):
        if self.ending is not None:
            self.ending.join()
            self.ending = None

    def fail(self):
        """Ends the communicator, and takes another address: nodes of the failed update may still connect at this one."""
        self.leave()
        if self.listener is not None:
            self.listener.close()
        self.listener, self.token = None, secrets.token_hex(16)

    def close(self):
        self.fail()
        self.join_ending()
        self.buffers = []

    def listening(self, state_dict):
        return Sending(self, state_dict)


class Sending:
    """One update by NCCL. Each node has a TCP connection, which tells that an end has died.

    1. A node connects, or reuses its connection. The node sends the token of the address, which keeps
       strangers out.
    2. Once all tokens have arrived, the trainer sends each node the tensors, the id of the communicator and the node's rank:
       one line of JSON.
    3. Each node checks the tensors and the hash of the plan. If the communicator is new, the node joins the communicator and
       receives a broadcast without weights. The node sends 8 zero bytes.
    4. Rank 0, the trainer, broadcasts the chunks in order. A node that fails closes its connection.
    5. The trainer sends each node the digests of the tensors."""

    # Time for the nodes to connect and to join, in which a node in place may let sequences finish.
    JOIN_SECONDS = 60
    # Time for a node to send the token, which it does at once.
    TOKEN_SECONDS = 2
    CONNECT_BYTES = 1 << 20
    # Time of a broadcast, which takes milliseconds.
    CHUNK_SECONDS = 10

    def __init__(self, sender, state_dict):
        self.sender = sender
        self.weights = Chunks(state_dict, sender.chunk_bytes)

    def __enter__(self):
        self.address = self.sender.address()
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.close()

    def close(self):
        self.sender.fail()

    def send(self, nodes):
        import torch

        sender, device = self.sender, self.weights.device
        torch.cuda.set_device(device)
        deadline = time.monotonic() + self.JOIN_SECONDS
        is_known = self.accept(nodes, deadline) and sender.nccl.device == device
        if not is_known:
            # A node may be waiting for a peer that has left.
            connections, sender.connections = sender.connections, []
            sender.leave()
            sender.connections = connections
            sender.join_ending()
            sender.nccl = Nccl(device)
        nccl = sender.nccl
        declaration = {"chunk_bytes": sender.chunk_bytes, "plan": self.weights.plan, "tensors": self.weights.tensors}
        for rank, connection in enumerate(sender.connections, 1):
            connection.settimeout(self.CHUNK_SECONDS)
            broadcast = {"gpu": uuid_of(device), "id": nccl.id.hex(), "rank": rank, "ranks": nodes + 1,
                         "buffers": sender.buffer_count, "max_ctas": sender.max_ctas}
            connection.sendall(json.dumps({**declaration, "broadcast": broadcast}).encode() + b"\n")
        ready, readable = set(), select.poll()
        by_descriptor = {connection.fileno(): connection for connection in sender.connections}
        for descriptor in by_descriptor:
            readable.register(descriptor, select.POLLIN)

        def check():
            """Fails if a node has left."""
            for descriptor, _ in readable.poll(0):
                if not receive(by_descriptor[descriptor], 8):
                    raise UpdateError("a node has closed its connection before the last chunk")
                ready.add(descriptor)

        stream, buffer = torch.cuda.Stream(device), sender.take_buffers(device)[0]
        if not is_known:
            nccl.join(nodes + 1, sender.max_ctas, check, deadline)
            # The first broadcast carries no weights: it connects the ranks.
            nccl.broadcast(buffer.data_ptr(), min(self.CONNECT_BYTES, sender.chunk_bytes), stream.cuda_stream, deadline, check)
        while len(ready) < nodes:
            check()
            if time.monotonic() > deadline:
                raise UpdateError(f"{nodes - len(ready)} nodes have not joined within {self.JOIN_SECONDS} s")
            time.sleep(0.0005)
        self.broadcast(nccl, device, stream, check)
        digests = self.weights.digests.read()
        for connection in sender.connections:
            connection.sendall(digests)

    def accept(self, nodes, deadline):
        """Waits for the token of every node. Returns whether these connections are exactly those of the communicator."""
        sender, found = self.sender, []
        try:
            self.collect(nodes, deadline, found)
        except BaseException:
            for connection in found:
                connection.close()
            raise
        members = sender.connections
        if sender.nccl is not None and set(found) == set(members):
            return True
        for connection in members:
            if connection not in found:
                connection.close()
        sender.connections = found
        return False

    def collect(self, nodes, deadline, found):
        """Adds the connections whose nodes have sent the token to `found`."""
        sender = self.sender
        members, waiting = list(sender.connections), select.poll()
        by_descriptor = {connection.fileno(): connection for connection in [sender.listener, *members]}
        for descriptor in by_descriptor:
            waiting.register(descriptor, select.POLLIN)
        sender.listener.settimeout(self.TOKEN_SECONDS)
        while len(found) < nodes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise UpdateError(f"{len(found)} of {nodes} nodes have connected within {self.JOIN_SECONDS} s")
            for descriptor, _ in waiting.poll(left * 1000):
                connection = by_descriptor[descriptor]
                if connection is sender.listener:
                    try:
                        connection, _ = sender.listener.accept()
                    except OSError:
                        continue
                    connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
                    keep_alive(connection)
                else:
                    # Another connection may get the number of a closed one.
                    waiting.unregister(descriptor)
                connection.settimeout(self.TOKEN_SECONDS)
                try:
                    token = receive(connection, len(sender.token))
                except OSError:
                    # A stranger, who sends nothing or has left.
                    token = b""
                if secrets.compare_digest(token, sender.token.encode()):
                    found.append(connection)
                else:
                    connection.close()
                if len(found) == nodes:
                    return

    def broadcast(self, nccl, device, stream, check):
        import torch

        buffers, sent = self.sender.take_buffers(device), []
        # The next chunk is packed beside the broadcast of a chunk.
        packing = torch.cuda.Stream(device)
        for index in range(len(self.weights.chunks)):
            if index >= len(buffers):
                self.wait(sent[index - len(buffers)], check)
            buffer = buffers[index % len(buffers)]
            with torch.cuda.stream(packing):
                size = self.weights.pack(index, buffer)
            stream.wait_stream(packing)
            nccl.broadcast(buffer.data_ptr(), size, stream.cuda_stream, time.monotonic() + self.CHUNK_SECONDS, check)
            sent.append(torch.cuda.Event())
            sent[-1].record(stream)
        for event in sent[-len(buffers):]:
            self.wait(event, check)

    def wait(self, event, check):
        deadline = time.monotonic() + self.CHUNK_SECONDS
        while not event.query():
            check()
            if time.monotonic() > deadline:
                raise UpdateError(f"a broadcast takes longer than {self.CHUNK_SECONDS} s")


class NcclConfig(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18, which later versions accept."""
    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int),
    ]


class NcclId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


class Nccl:
    """Rank 0 of a communicator that never blocks for longer than its deadlines."""

    IN_PROGRESS, UINT8, UNDEFINED = 7, 1, -(1 << 31)

    def __init__(self, device):
        self.device = device
        # As on the nodes: a program that crashes while it uses NVLink multicast can take GPUs out of service.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # The library that PyTorch has loaded.
        self.library = ctypes.CDLL("libnccl.so.2")
        self.unique, self.communicator = NcclId(), ctypes.c_void_p()
        self.check("ncclGetUniqueId", self.library.ncclGetUniqueId(ctypes.byref(self.unique)))
        self.id = bytes(self.unique.bytes)

    def join(self, ranks, max_ctas, check, deadline):
        undefined = self.UNDEFINED
        config = NcclConfig(
            ctypes.sizeof(NcclConfig), 0xCAFEBEEF, 21800, 0, undefined, undefined if max_ctas is None else 1,
            undefined if max_ctas is None else max_ctas, None, undefined)
        code = self.library.ncclCommInitRankConfig(
            ctypes.byref(self.communicator), ranks, self.unique, 0, ctypes.byref(config))
        self.finish("ncclCommInitRankConfig", code, check, deadline)

    def broadcast(self, address, size, stream, deadline, check):
        pointer = ctypes.c_void_p(address)
        code = self.library.ncclBroadcast(
            pointer, pointer, ctypes.c_size_t(size), self.UINT8, 0, self.communicator, ctypes.c_void_p(stream))
        self.finish("ncclBroadcast", code, check, deadline)

    def finish(self, call, code, check, deadline):
        """Waits until NCCL has accepted the call."""
        state = ctypes.c_int(code)
        while state.value == self.IN_PROGRESS:
            check()
            if time.monotonic() > deadline:
                raise UpdateError(f"{call} has timed out: a node is missing")
            self.check("ncclCommGetAsyncError",
                       self.library.ncclCommGetAsyncError(self.communicator, ctypes.byref(state)))
        self.check(call, state.value)

    def abort(self):
        if self.communicator:
            self.library.ncclCommAbort(self.communicator)
            self.communicator = ctypes.c_void_p()

    def check(self, call, code):
        if code != 0:
            self.library.ncclGetErrorString.restype = ctypes.c_char_p
            reason = self.library.ncclGetErrorString(code).decode()
            raise UpdateError(f"{call} failed ({code}): {reason}")


def uuid_of(device):
    """Returns the UUID of a GPU as nvidia-smi shows it."""
    make_current(device)
    number, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    cuda = ctypes.CDLL("libcuda.so.1")
    check_cuda(cuda, device, ("cuCtxGetDevice", ctypes.byref(number)), ("cuDeviceGetUuid", ctypes.byref(uuid), number))
    digits = bytes(uuid).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def make_current(device):
    """Makes the context of a GPU current on this thread."""
    import torch

    torch.cuda.set_device(device)
    torch.zeros(1, device=device)


def check_cuda(cuda, device, *calls):
    for name, *arguments in calls:
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            raise UpdateError(f"cannot use {device}: {name} failed ({code})")


def cut(sizes, chunk_bytes):
    """Cuts tensors into chunks of at most `chunk_bytes`: lists of (tensor, first byte, bytes). Nodes cut in the same way."""
    chunks, left = [], 0
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if left == 0:
                chunks.append([])
                left = chunk_bytes
            count = min(left, size - begin)
            chunks[-1].append((tensor, begin, count))
            begin, left = begin + count, left - count
    return chunks


def plan_hash(tensors, chunks):
    """Returns the hash of tensors and cuts that nodes compare with their own."""
    plan = hashlib.sha256()
    for tensor in tensors:
        plan.update("{}\t{}\t{}\n".format(tensor["name"], tensor["dtype"], ",".join(map(str, tensor["shape"]))).encode())
    for chunk in chunks:
        plan.update((" ".join(f"{tensor}:{begin}:{size}" for tensor, begin, size in chunk) + "\n").encode())
    return plan.hexdigest()[:32]


def receive(connection, size):
    """Returns `size` bytes, or none if the peer has closed the connection."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data


def write_shards(folder, named):
    """Writes tensors, given as names and values, to safetensors files and an index."""
    files, shard, size = {}, {}, 0

    def write():
        if shard:
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            write_safetensors(os.path.join(folder, file), shard)
            files.update(dict.fromkeys(shard, file))
            shard.clear()

    for name, value in named:
        if name in files or name in shard:
            raise UpdateError(f"tensor {name} was given twice; expected each name once")
        dtype, shape, count = describe(name, value)
        if size + count > SHARD_BYTES:
            write()
            size = 0
        # On the host, so that the GPU's memory is free for the next tensor.
        shard[name] = value if isinstance(value, tuple) else (dtype, shape, raw_bytes(value))
        size += count
    write()
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as index:
        json.dump({"weight_map": files}, index)


def write_safetensors(path, state_dict):
    """Writes a safetensors file: the length of the header, the header in JSON, and the tensors' bytes."""
    header, end = {}, 0
    for name, value in state_dict.items():
        dtype, shape, size = describe(name, value)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in state_dict.values():
            file.write(value[2] if isinstance(value, tuple) else raw_bytes(value))
        file.flush()
        os.fsync(file.fileno())


def describe(name, value):
    if isinstance(value, tuple):
        dtype, shape, data = value
        return dtype, list(shape), len(data)
    dtype = DTYPES.get(str(value.dtype))
    if dtype is None:
        raise UpdateError(f"tensor {name} has dtype {value.dtype}; expected one of {', '.join(DTYPES)}")
    return dtype, list(value.shape), value.numel() * value.element_size()


def raw_bytes(tensor):
    import torch

    tensor = tensor.detach().to("cpu").contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes()
