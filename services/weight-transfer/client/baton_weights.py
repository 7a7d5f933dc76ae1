"""Gives a running Baton cluster new weights from a PyTorch trainer: one file, no dependency but torch.

    updater = WeightUpdater("http://router:8002", folder="/models/updates", config="/models/base")
    for step in range(1000):
        train()
        if step % 100 == 0:
            updater.push(model.state_dict(), label=f"step {step}")

With a trainer on the host of all nodes, and weights on GPUs, no byte passes through files or the host:

    updater = WeightUpdater("http://router:8002", transport="ipc", socket="/run/baton/trainer.sock")
    updater.push(model.state_dict())

The nodes read chunks in the memory of the trainer's GPU (CUDA IPC). Matrices have the element type of the nodes
(model.dtype). Do not change the weights before `push` or `prepare` returns.

With transport "disk", `folder` must have the same path on the trainer and on every node. `push` writes a safetensors model there, lets every
node prepare it, and commits it on all nodes or on none. Requests continue meanwhile. `prepare` and `commit` are the two
halves of `push`, for a trainer that does other work in between.

A state dict has the names of Hugging Face. Values are torch tensors, or tuples (dtype, shape, bytes) with dtype "F32",
"F16" or "BF16".
"""

import ctypes
import json
import os
import shutil
import socket as sockets
import struct
import threading
import time
import urllib.error
import urllib.request

DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
COPIED = ("config.json", "generation_config.json")
POLL_SECONDS = 0.05
# Time beyond an update's time-out: the router commits for up to 60 s.
GRACE_SECONDS = 90


class UpdateError(Exception):
    """The cluster did not take up the weights; it serves the old ones."""


class WeightUpdater:
    def __init__(self, admin, folder=None, config=None, api_key=None, model=None, timeout=300, keep=2,
                 in_flight="recompute", transport="disk", socket=None, chunk_bytes=256 << 20, buffers=2):
        """admin: URL of router.admin. in_flight: what becomes of requests in flight at a commit: recompute, keep_kv, wait
        or abort. transport: disk or ipc.
        disk: folder: place of the updates. config: folder with the model's config.json. keep: updates left in the folder.
        ipc: socket: path of the Unix socket, the same on every node. Each node takes `buffers` times `chunk_bytes` of the
        trainer's GPU memory, which is kept for the next update."""
        self.admin, self.config = admin.rstrip("/"), config
        self.api_key, self.model, self.timeout, self.keep = api_key, model, timeout, max(2, keep)
        self.in_flight, self.transport = in_flight, transport
        needed = {"disk": {"folder": folder, "config": config}, "ipc": {"socket": socket}}
        if transport not in needed:
            raise UpdateError(f"invalid transport: {transport!r}; expected one of {', '.join(needed)}")
        for name, value in needed[transport].items():
            if value is None:
                raise UpdateError(f"missing {name}; expected it with transport {transport}")
        if transport == "disk":
            self.folder = os.path.abspath(folder)
            os.makedirs(self.folder, exist_ok=True)
        else:
            self.memory = GpuChunks(os.path.abspath(socket), chunk_bytes, buffers)

    def push(self, state_dict, label=""):
        """Writes, prepares and commits the weights. Returns the router's report of the update."""
        return self.commit(self.prepare(state_dict, label))

    def prepare(self, state_dict, label=""):
        """Returns the update's id once every node holds the weights beside those in use."""
        if self.transport == "ipc":
            with self.memory.offered(state_dict):
                return self.begin(self.memory.socket, label)
        return self.begin(self.write(state_dict), label)

    def begin(self, path, label):
        body = {"path": path, "label": label, "timeout_s": self.timeout, "in_flight": self.in_flight}
        if self.transport != "disk":
            body["transport"] = self.transport
        if self.model is not None:
            body["model"] = self.model
        update = self.call("POST", "/begin", body)
        if update is None or "id" not in update:
            raise UpdateError(f"the answer of {self.admin} has no update.id; expected the address of router.admin")
        return self.wait(update["id"], "prepared")["id"]

    def commit(self, update_id):
        self.call("POST", f"/{update_id}/commit")
        update = self.wait(update_id, "committed")
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
        write_safetensors(os.path.join(partial, "model.safetensors"), state_dict)
        os.rename(partial, path)
        return path

    def wait(self, update_id, phase):
        deadline = time.monotonic() + self.timeout + GRACE_SECONDS
        while time.monotonic() < deadline:
            update = self.call("GET", "")
            if update is None or update.get("id") != update_id:
                raise UpdateError(f"update {update_id} is not the router's last update: {update}")
            if update.get("phase") in (phase, "committed"):
                return update
            if update.get("phase") == "aborted":
                raise UpdateError(f"update {update_id} was aborted: {update.get('reason')}")
            time.sleep(POLL_SECONDS)
        raise UpdateError(f"update {update_id} is not {phase} within {self.timeout + GRACE_SECONDS} s")

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
            text = error.read().decode(errors="replace")
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                pass
            raise UpdateError(f"{method} {url}: {error.code} {text}") from None
        except OSError as error:
            raise UpdateError(f"cannot reach the router's admin API: {method} {url}: {error}") from None
        try:
            return json.loads(text)["update"]
        except (ValueError, KeyError, TypeError):
            shown = text[:200].decode(errors="replace")
            raise UpdateError(f"cannot read the answer of {url}: {shown!r}; expected JSON with the field update") from None


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
        return [GpuBuffer(device, self.chunk_bytes) for _ in range(self.buffer_count)]

    def give_buffers(self, buffers):
        with self.lock:
            self.free.append(buffers)


class Offer:
    """The chunks of one state dict, for as long as nodes may read them."""

    def __init__(self, memory, state_dict):
        import torch

        self.memory, self.threads, self.connections, self.error = memory, [], [], None
        self.tensors, self.sources = [], []
        for name, value in state_dict.items():
            if isinstance(value, tuple) or not value.is_cuda:
                raise UpdateError(f"tensor {name} is not on a GPU; expected a torch tensor on one with transport ipc")
            dtype, shape, _ = describe(name, value)
            self.tensors.append({"name": name, "dtype": dtype, "shape": shape})
            self.sources.append(value.detach().contiguous().reshape(-1).view(torch.uint8))
        if not self.sources:
            raise UpdateError("the state dict is empty; expected at least one tensor")
        self.device = self.sources[0].device
        self.chunks = cut([source.numel() for source in self.sources], memory.chunk_bytes)
        for device in {source.device for source in self.sources}:
            torch.cuda.synchronize(device)

    def __enter__(self):
        path = self.memory.socket
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.exists(path):
            os.unlink(path)
        self.listener = sockets.socket(sockets.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.listener.settimeout(0.1)
        self.is_open = True
        self.accepting = threading.Thread(target=self.accept, daemon=True)
        self.accepting.start()
        return self

    def __exit__(self, kind, error, trace):
        """Waits until every node has closed its connection: it then reads this memory no more."""
        self.is_open = False
        self.accepting.join()
        self.listener.close()
        if os.path.exists(self.memory.socket):
            os.unlink(self.memory.socket)
        deadline = time.monotonic() + GpuChunks.CLOSE_SECONDS
        for thread, connection in zip(self.threads, self.connections):
            thread.join(max(0, deadline - time.monotonic()))
            if thread.is_alive():
                connection.shutdown(sockets.SHUT_RDWR)
                thread.join()
        if self.error is not None and isinstance(error, UpdateError):
            raise UpdateError(f"{error}: {self.error}") from self.error

    def accept(self):
        while self.is_open:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(None)
            thread = threading.Thread(target=self.serve, args=(connection,), daemon=True)
            self.connections.append(connection)
            self.threads.append(thread)
            thread.start()

    def serve(self, connection):
        import torch

        buffers = None
        try:
            torch.cuda.set_device(self.device)
            buffers = self.memory.take_buffers(self.device)
            declaration = {
                "chunk_bytes": self.memory.chunk_bytes,
                "buffers": [{"gpu": buffer.gpu, "handle": buffer.handle} for buffer in buffers],
                "tensors": self.tensors,
            }
            connection.sendall(json.dumps(declaration).encode() + b"\n")
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(stream):
                while request := receive(connection, 8):
                    (index,) = struct.unpack("<Q", request)
                    end = 0
                    for tensor, begin, size in self.chunks[index]:
                        to = buffers[index % len(buffers)].bytes[end : end + size]
                        to.copy_(self.sources[tensor][begin : begin + size], non_blocking=True)
                        end += size
                    stream.synchronize()
                    connection.sendall(struct.pack("<QQ", index, end))
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

        torch.cuda.set_device(device)
        # Makes the context current on this thread.
        torch.zeros(1, device=device)
        cuda = ctypes.CDLL("libcuda.so.1")
        address, number = ctypes.c_uint64(), ctypes.c_int()
        handle, uuid = (ctypes.c_ubyte * 64)(), (ctypes.c_ubyte * 16)()
        for name, *arguments in [
            ("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size)),
            ("cuIpcGetMemHandle", ctypes.byref(handle), address),
            ("cuCtxGetDevice", ctypes.byref(number)),
            ("cuDeviceGetUuid", ctypes.byref(uuid), number),
        ]:
            code = getattr(cuda, name)(*arguments)
            if code != 0:
                raise UpdateError(f"cannot share {size} bytes of {device}: {name} failed ({code})")
        digits = bytes(uuid).hex()
        groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        self.gpu, self.handle, self.device = "GPU-" + "-".join(groups), bytes(handle).hex(), device
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address.value, False), "version": 3,
        }
        self.bytes = torch.as_tensor(self, device=device)


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


def receive(connection, size):
    """Returns `size` bytes, or none if the peer has closed the connection."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data


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
