"""Trains nothing, but pushes changed weights as a trainer does: trainer.py CLIENT ADMIN BASE FOLDER."""

import array
import json
import struct
import sys

sys.path.insert(0, sys.argv[1])
from baton_weights import UpdateError, WeightUpdater  # noqa: E402

admin, base, folder = sys.argv[2:]


def read(path):
    """Returns the tensors of a file as (dtype, shape, bytes)."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    tensors = {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


weights = read(f"{base}/model.safetensors")
name = "model.layers.3.mlp.up_proj.weight"
dtype, shape, data = weights[name]
values = array.array("f", data)
weights[name] = (dtype, shape, array.array("f", (1.5 * value for value in values)).tobytes())
updater = WeightUpdater(admin, folder, config=base)
update = updater.push(weights, label="step 1")
print(json.dumps({key: update[key] for key in ("path", "phase", "weight_version")}))

# A trainer that goes wrong leaves the cluster as it is, and learns why.
for change, words in [
    ({name: (dtype, [shape[1], shape[0]], data)}, "has shape"),
    ({name: (dtype, shape, array.array("f", [float("nan")] * len(values)).tobytes())}, "is NaN"),
    ({"model.layers.3.mlp.other.weight": (dtype, shape, data)}, "is not part of the llama architecture"),
    ({name: ("I8", shape, data[: len(values)])}, "unsupported type I8"),
]:
    try:
        updater.push({**weights, **change})
    except UpdateError as error:
        assert words in str(error), f"{error} lacks {words!r}"
    else:
        raise AssertionError(f"the cluster took weights that should say {words!r}")
missing = {key: value for key, value in weights.items() if key != name}
try:
    updater.push(missing)
except UpdateError as error:
    assert f'tensor "{name}" is missing' in str(error), error
else:
    raise AssertionError("the cluster took weights without a tensor")
