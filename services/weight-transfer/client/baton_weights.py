"""Gives a running Baton cluster new weights from a PyTorch trainer: one file, no dependency but torch.

    updater = WeightUpdater("http://router:8002", folder="/models/updates", config="/models/base")
    for step in range(1000):
        train()
        if step % 100 == 0:
            updater.push(model.state_dict(), label=f"step {step}")

`folder` must have the same path on the trainer and on every node. `push` writes a safetensors model there, lets every
node prepare it, and commits it on all nodes or on none. Requests continue meanwhile. `prepare` and `commit` are the two
halves of `push`, for a trainer that does other work in between.

A state dict has the names of Hugging Face. Values are torch tensors, or tuples (dtype, shape, bytes) with dtype "F32",
"F16" or "BF16".
"""

import json
import os
import shutil
import struct
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
    def __init__(self, admin, folder, config, api_key=None, model=None, timeout=300, keep=2,
                 in_flight="recompute"):
        """admin: URL of router.admin. config: folder with the model's config.json. keep: updates left in the folder.
        in_flight: what becomes of requests in flight at a commit: recompute, keep_kv, wait or abort."""
        self.admin, self.folder, self.config = admin.rstrip("/"), os.path.abspath(folder), config
        self.api_key, self.model, self.timeout, self.keep = api_key, model, timeout, max(2, keep)
        self.in_flight = in_flight
        os.makedirs(self.folder, exist_ok=True)

    def push(self, state_dict, label=""):
        """Writes, prepares and commits the weights. Returns the router's report of the update."""
        return self.commit(self.prepare(state_dict, label))

    def prepare(self, state_dict, label=""):
        """Returns the update's id once every node holds the weights beside those in use."""
        path = self.write(state_dict)
        body = {"path": path, "label": label, "timeout_s": self.timeout, "in_flight": self.in_flight}
        if self.model is not None:
            body["model"] = self.model
        update = self.call("POST", "/begin", body)
        if update is None or "id" not in update:
            raise UpdateError(f"the answer of {self.admin} has no update.id; expected the address of router.admin")
        return self.wait(update["id"], "prepared")["id"]

    def commit(self, update_id):
        self.call("POST", f"/{update_id}/commit")
        update = self.wait(update_id, "committed")
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
