#!/usr/bin/env python3
"""Weight updates from a trainer's GPU to real nodes: weight_updates.py check|bench|load --bin FOLDER [options].

check  Compares greedy answers before and after updates from the trainer, and back, with those of nodes that read the weights from disk.
       Kills a trainer at several chunks, stops one, damages a chunk, and offers invalid weights. With --transport disk only compares answers.
bench  Prints time, pause and bandwidth of updates for several numbers of buffers and chunk sizes (random weights).
load   Updates under --streams streams: inter-token latency between updates, while chunks arrive, and with commits, which
       recompute the sequences; failed requests. With --check-versions the streams ask for the version of each token: every
       version must have been in use while its answer ran, and none follows a newer one.

Needs torch with CUDA. One GPU: the trainer shares the node's GPU. --trainer-gpu 1: the trainer has another GPU.
--tp 2 --node-gpus 0,1: a node of two ranks, by ipc and disk.
"""
import argparse
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "services/weight-transfer/client"))
import baton_weights  # noqa: E402
from baton_weights import UpdateError, WeightUpdater, write_safetensors  # noqa: E402

MIB = 1 << 20
HTTP, GRPC, ADMIN = 18000, 18001, 18002
PROMPTS = [[(7 * at * at + 13 * number) % 30_000 + 1 for at in range(24 + 5 * number)] for number in range(6)]
READY_SECONDS = 240


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["check", "bench", "load", "trainer", "streams"])
    parser.add_argument("--bin", help="folder of baton and the services")
    parser.add_argument("--kernels", help="path of libbaton_kernels.so")
    parser.add_argument("--size", default=None, choices=["tiny", "1b", "8b"], help="default: tiny for check, 8b for bench")
    parser.add_argument("--transport", default="ipc", choices=["ipc", "nccl", "disk"], help="nccl needs --trainer-gpu 1")
    parser.add_argument("--node-gpus", default="0", help="GPUs of the node, one for each rank")
    parser.add_argument("--trainer-gpu", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--place", default="shadow", choices=["shadow", "in_place"])
    parser.add_argument("--memory-percent", type=int, default=45)
    parser.add_argument("--buffers", default=None, help="default: 1,2,3,8 for bench, 2 for load")
    parser.add_argument("--chunk-mib", default="64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-ctas", type=int, default=None, help="nccl: largest number of CTAs of a broadcast")
    parser.add_argument("--in-flight", default="recompute", choices=["recompute", "keep_kv"], help="in_flight of each commit (load)")
    parser.add_argument("--output-tokens", type=int, default=512, help="output tokens of each request (load); long outputs have few prefills")
    parser.add_argument("--check-versions", action="store_true", help="check the weight versions of all tokens (load)")
    # Of the mode trainer, which `check` starts.
    parser.add_argument("--socket")
    parser.add_argument("--end-at", type=int, default=-1)
    parser.add_argument("--end-by", default="SIGKILL", choices=["SIGKILL", "SIGSTOP"])
    return parser.parse_args()


def write_config(folder, size):
    subprocess.run([sys.executable, HERE / "random_model.py", folder, size], check=True)
    return json.loads((folder / "config.json").read_text())


def random_weights(config, seed, device):
    import torch

    torch.manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, device=device, dtype=torch.bfloat16)
        weights[name] = 1 + noise / 50 if len(shape) == 1 else noise * shape[1] ** -0.5
    return weights


def call(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


class Cluster:
    def __init__(self, options, model, dummy=False):
        # Log lines, and the arrival time of each.
        self.lines, self.times, self.changed = [], [], threading.Condition()
        environment = os.environ | {
            "BATON_WEIGHTS_PLACE": options.place, "BATON_ROUTER_ADMIN": f"127.0.0.1:{ADMIN}", "BATON_MODEL_NAME": "model",
            "BATON_NODE_GPU_MEMORY_PERCENT": str(options.memory_percent), "BATON_NODE_GPU_TUNE": "0s",
            "BATON_NODE_DEVICE": "cuda", "NO_COLOR": "1", "NCCL_NVLS_ENABLE": "0",
            "BATON_WEIGHTS_BUFFERS": "8" if options.transport == "nccl" else "1",
        }
        if options.kernels:
            environment["BATON_NODE_KERNELS"] = str(pathlib.Path(options.kernels).resolve())
        command = [
            pathlib.Path(options.bin) / "baton", "up", "--model", model, "--prefill", "0", "--decode", "1", "--gpus",
            options.node_gpus, "--tp", str(options.tp), "--http", f"127.0.0.1:{HTTP}", "--grpc", f"127.0.0.1:{GRPC}",
            "--dtype", "bf16", "--load-format", "dummy" if dummy else "auto",
        ]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def __enter__(self):
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()))
                self.times.append(time.perf_counter())
                self.changed.notify_all()

    def wait_ready(self):
        deadline = time.monotonic() + READY_SECONDS
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the cluster did not start:\n" + "\n".join(self.lines[-40:]))
            with contextlib.suppress(OSError):
                nodes = json.loads(call(ADMIN, "/v1/weights"))["nodes"]
                if nodes and nodes[0]["weight_version"] != "none" and call(HTTP, "/ready") is not None:
                    return
            time.sleep(0.1)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.reader.join(10)

    def wait_line(self, words, since, seconds=30):
        """Returns the first line of the log with these words after line `since`."""
        at = self.wait_index(words, since, seconds)
        return None if at is None else self.lines[at]

    def wait_index(self, words, since, seconds=30):
        with self.changed:
            find = lambda: next((at for at in range(since, len(self.lines)) if words in self.lines[at]), None)
            self.changed.wait_for(lambda: find() is not None, seconds)
            return find()

    def answers(self):
        found = []
        # Cached prefixes change the shapes of GEMMs, and with them the last bits.
        salt = os.urandom(8).hex()
        for prompt in PROMPTS:
            body = {"cache_salt": salt, "prompt": prompt, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True,
                    "logprobs": 1}
            choice = json.loads(call(HTTP, "/v1/completions", body))["choices"][0]
            found.append((choice.get("token_ids") or choice["text"], choice["logprobs"]["token_logprobs"]))
        return found


def end_at_chunk(number, by):
    """Makes this process send itself a signal when a node asks for a chunk. A process that continues goes on with the chunk."""
    sent = []

    class Ending(list):
        def __getitem__(self, index):
            if index >= number and not sent:
                sent.append(by)
                os.kill(os.getpid(), by)
            return super().__getitem__(index)

    make = baton_weights.cut
    baton_weights.cut = lambda *arguments: Ending(make(*arguments))


def new_updater(options, socket, **more):
    place = {"socket": socket}
    if options.transport == "nccl":
        place = {"host": "127.0.0.1", "nccl_max_ctas": options.max_ctas}
    elif options.transport == "disk":
        folder = pathlib.Path(socket).parent
        place = {"folder": folder / "updates", "config": folder / ("base" if options.mode == "check" else "model")}
    return WeightUpdater(f"http://127.0.0.1:{ADMIN}", transport=options.transport, **place, **more)


def run_trainer(options):
    """A trainer that is killed or stopped at a chunk."""
    import torch

    config = json.loads((pathlib.Path(options.bin) / "config.json").read_text())
    end_at_chunk(options.end_at, signal.Signals[options.end_by])
    weights = random_weights(config, 3, torch.device("cuda", options.trainer_gpu))
    new_updater(options, options.socket, chunk_bytes=16 * MIB).push(weights)


def logged(line, name):
    """Returns a number of a log line."""
    return float(re.search(rf'\b{name}"?[=:]\s*([0-9.]+)', line).group(1))


def expect_error(words, act):
    try:
        act()
    except UpdateError as error:
        assert all(word in str(error) for word in words), f"{error}\nlacks one of {words}"
        print(f"  rejected: {error}")
    else:
        raise AssertionError(f"an update passed that should fail with {words}")


def check(options, folder):
    import torch

    device = torch.device("cuda", options.trainer_gpu)
    base, new = folder / "base", folder / "new"
    config = write_config(base, options.size or "tiny")
    weights = {name: random_weights(config, seed, device) for name, seed in {"base": 1, "new": 2}.items()}
    shutil.copytree(base, new)
    for path in (base, new):
        write_safetensors(path / "model.safetensors", weights[path.name])
    with Cluster(options, new) as cluster:
        expected_new = cluster.answers()
    socket = str(folder / "trainer.sock")
    updater = lambda **more: new_updater(options, socket, **({"chunk_bytes": 16 * MIB, "timeout": 60} | more))
    with Cluster(options, base) as cluster, contextlib.ExitStack() as cleanup:
        expected_base = cluster.answers()
        assert expected_base != expected_new
        stopped = None
        if options.transport != "disk":
            check_failures(options, cluster, base, socket, updater, weights["new"], expected_base)
            chunk = bytes_of(weights["new"]) // (32 * MIB)
            stopped = check_stopped(options, cluster, cleanup, base, socket, chunk, expected_base)
        versions = {}
        for buffers, chunk in [(1, 16 * MIB), (2, 16 * MIB), (3, 5 * MIB + 96), (8, 3 * MIB), (2, 256 * MIB)]:
            client = updater(buffers=buffers, chunk_bytes=chunk)
            for name, expected in [("new", expected_new), ("base", expected_base)]:
                since = len(cluster.lines)
                report = client.push(weights[name], label=name)
                assert cluster.answers() == expected, f"{name}: answers differ by {buffers} buffers of {chunk} bytes"
                assert versions.setdefault(name, report["weight_version"]) == report["weight_version"], "another version"
            client.close()
            if options.transport == "disk":
                print("  answers equal those of nodes that started with the files, and the old ones after the update back")
                break
            line = cluster.wait_line("received weights from a trainer", since)
            print(f"  {buffers} buffers of {chunk} bytes: answers equal those from disk, and the old ones after the update back; "
                  f"a rank received {logged(line, 'rank_bytes') / logged(line, 'bytes'):.3f} of the bytes")
        assert versions["new"] != versions["base"], "other weights have the same version"
        if stopped is not None:
            check_continued(stopped)
            assert cluster.answers() == expected_base, "answers changed after a stopped trainer continued"
    print("check passed")


def bytes_of(weights):
    return sum(value.nbytes for value in weights.values())


def start_trainer(options, base, socket, end_at, end_by):
    return subprocess.Popen([
        sys.executable, __file__, "trainer", "--bin", base, "--socket", socket, "--end-at", str(end_at), "--end-by", end_by,
        "--trainer-gpu", str(options.trainer_gpu), "--transport", options.transport])


def wait_serving(cluster, expected_base):
    """Waits until the last update is aborted, and compares answers with those before."""
    begin = time.monotonic()
    cluster.wait_ready()
    while json.loads(call(ADMIN, "/v1/weights"))["update"]["phase"] != "aborted":
        assert time.monotonic() - begin < READY_SECONDS, "the update is not aborted"
        time.sleep(0.05)
    assert cluster.answers() == expected_base, "answers changed after an update was aborted"


def check_stopped(options, cluster, cleanup, base, socket, chunk, expected_base):
    """Stops a trainer at a chunk. The node gives the update up and serves on. Returns the trainer, which is still stopped."""
    since = len(cluster.lines)
    trainer = start_trainer(options, base, socket, chunk, "SIGSTOP")
    cleanup.callback(trainer.kill)
    # The trainer has 120 s to start and to stop itself.
    deadline, status = time.monotonic() + 120, None
    while status is None or status == (0, 0):
        assert time.monotonic() < deadline, "the trainer has not reached the chunk"
        time.sleep(0.01)
        status = os.waitpid(trainer.pid, os.WUNTRACED | os.WNOHANG)
    assert os.WIFSTOPPED(status[1]), f"the trainer ended with status {status[1]}"
    stopped = time.monotonic()
    line = cluster.wait_line("the weight update was aborted", since, 30)
    assert line, "the node waits for a stopped trainer"
    print(f"  trainer stopped at chunk {chunk}: reported {time.monotonic() - stopped:.2f} s later")
    wait_serving(cluster, expected_base)
    return trainer


def check_continued(trainer):
    """Lets a stopped trainer continue: its update has failed meanwhile, and it must end."""
    trainer.send_signal(signal.SIGCONT)
    assert trainer.wait(120) == 1, f"the trainer ended with {trainer.returncode}; expected an error of its update"


def check_failures(options, cluster, base, socket, updater, valid, expected_base):
    """Kills trainers, damages a chunk, and offers invalid weights: the node keeps its weights."""
    assert baton_weights.fastest_terms(next(iter(valid.values())).device)[0] is not baton_weights.terms, "PyTorch compiles no kernels"
    chunks = -(-bytes_of(valid) // (16 * MIB))
    for die_at in [0, 1, chunks // 2, chunks - 1]:
        since = len(cluster.lines)
        assert start_trainer(options, base, socket, die_at, "SIGKILL").wait(120) == -signal.SIGKILL
        died = time.monotonic()
        line = cluster.wait_line("the weight update was aborted", since, 3)
        assert line and "the trainer closed the connection" in line, line
        print(f"  trainer killed at chunk {die_at} of {chunks}: reported {time.monotonic() - died:.2f} s later")
        wait_serving(cluster, expected_base)
    name = "model.layers.1.mlp.up_proj.weight"
    up = valid[name]
    other = {**valid, name: up.clone()}
    other[name][3, 5] = float("nan")
    with_handle = baton_weights.GpuBuffer.__init__
    for what, words, change in [
        ("shape", ["has shape", name], {**valid, name: up[:-8]}),
        ("dtype", ["has dtype F32; expected BF16", name], {**valid, name: up.float()}),
        ("missing", ["is missing", name], {key: value for key, value in valid.items() if key != name}),
        ("unknown", ["is not part of the llama architecture"], {**valid, "other": up}),
        ("not finite", ["1 elements of tensor", name], other),
    ]:
        if options.place == "in_place" and what == "not finite":
            continue  # The node would read its weights again; the kills have covered this.
        expect_error(words, lambda: updater().push(change))

    pack = baton_weights.Chunks.pack

    def damaged(self, index, buffer):
        size = pack(self, index, buffer)
        if index == 1:
            # The lowest bit of an element, which stays finite.
            buffer[size // 4 * 2] ^= 1
        return size

    if options.place == "shadow":
        baton_weights.Chunks.pack = damaged
        expect_error(["arrived with digest", "the trainer's digest"], lambda: updater().push(valid))
        baton_weights.Chunks.pack = pack

    def invalid_handle(self, *arguments):
        with_handle(self, *arguments)
        self.handle = "5a" * 64

    if options.transport == "ipc":
        baton_weights.GpuBuffer.__init__ = invalid_handle
        expect_error(["cannot map the memory"], lambda: updater().push(valid))
        baton_weights.GpuBuffer.__init__ = with_handle
    if str(options.trainer_gpu) == options.node_gpus:
        options.transport = "nccl"
        expect_error(["NCCL allows one rank on a GPU", "expected transport ipc"], lambda: updater().push(valid))
        options.transport = "ipc"
    assert cluster.answers() == expected_base, "answers changed after rejected updates"


def bench(options, folder):
    import torch

    device = torch.device("cuda", options.trainer_gpu)
    config = write_config(folder / "model", options.size or "8b")
    weights = random_weights(config, 1, device)
    total = sum(value.nbytes for value in weights.values())
    print(f"{total / 1e9:.2f} GB, {torch.cuda.get_device_name(device)}, trainer on GPU {options.trainer_gpu}, node on "
          f"{options.node_gpus}, transport {options.transport}, place {options.place}")
    print("| buffers | chunk MiB | chunks | round | received ms | ms before the first chunk | GB/s | pause ms | push ms | fraction of bytes per rank |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with Cluster(options, folder / "model", dummy=True) as cluster:
        for chunk in [int(mib) for mib in options.chunk_mib.split(",")]:
            for buffers in [int(count) for count in (options.buffers or "1,2,3,8").split(",")]:
                updater = new_updater(options, str(folder / "trainer.sock"), chunk_bytes=chunk * MIB, buffers=buffers)
                path = updater.write(weights) if options.transport == "disk" else None
                for number in range(options.rounds):
                    since, began = len(cluster.lines), time.perf_counter()
                    report = updater.push(weights) if path is None else updater.wait(updater.begin(path, "", True)["id"], ["committed"])
                    push_ms = (time.perf_counter() - began) * 1e3
                    if path is not None:
                        line = cluster.wait_line("read weights from files", since)
                        print(f"push ms {push_ms:.0f}, pause ms {report['nodes'][0].get('paused_ms')}: {line}", flush=True)
                        continue
                    line = cluster.wait_line("received weights from a trainer", since)
                    received, mapped = logged(line, "received_ms"), logged(line, "mapped_ms")
                    share = logged(line, "rank_bytes") / logged(line, "bytes")
                    paused = report["nodes"][0].get("paused_ms", float("nan"))
                    print(f"| {buffers} | {chunk} | {int(logged(line, 'chunks'))} | {number + 1} | {received:.1f} | {mapped:.1f} | "
                          f"{total / received / 1e6:.0f} | {paused:.1f} | {push_ms:.0f} | {share:.3f} |", flush=True)
                updater.close()


class Streams:
    """Requests in a loop in processes of their own: this one drives the trainer, and Python runs one thread at a time."""

    PROCESSES = 4

    def __init__(self, count, output_tokens, asks_versions):
        shares = [len(range(process, count, self.PROCESSES)) for process in range(min(count, self.PROCESSES))]
        self.processes = [
            subprocess.Popen([sys.executable, __file__, "streams", "--streams", str(share), "--output-tokens", str(output_tokens),
                              *["--check-versions"] * asks_versions], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for share in shares
        ]
        self.gaps, self.finished, self.failed, self.answers = [], 0, [], []

    def percentiles(self, *windows):
        """Returns percentiles of the gaps that end in one of the windows, and their number."""
        gaps = sorted(gap * 1e3 for at, gap in self.gaps if any(begin <= at < end for begin, end in windows))
        return [*([gaps[int(len(gaps) * share)] for share in (0.5, 0.99, 0.999)] if gaps else [float("nan")] * 3), len(gaps)]

    def stop(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            found = json.loads(process.stdout.read())
            process.wait(60)
            self.finished += found["finished"]
            self.failed += found["failed"]
            self.gaps += found["gaps"]
            self.answers += found["answers"]


def check_versions(answers, commits, output_tokens):
    """Checks the weight versions of the tokens of each answer. `commits`: version, begin and end of each commit, in order."""
    numbers = {version: number for number, (version, _, _) in enumerate(commits)}
    assert len(numbers) == len(commits), f"{len(commits)} updates have {len(numbers)} versions"
    ends = [end for _, _, end in commits[1:]] + [float("inf")]
    for answer in answers:
        if answer["is_finished"]:
            assert answer["tokens"] == output_tokens, f"{answer['tokens']} of {output_tokens} tokens name their weights"
        unknown = [version for version, _ in answer["versions"] if version not in numbers]
        assert not unknown, f"tokens of weights that were never committed: {unknown}"
        order = [numbers[version] for version, _ in answer["versions"]]
        assert order == sorted(set(order)), f"tokens of older weights follow tokens of newer ones: updates {order}"
        for version, at in answer["versions"]:
            number = numbers[version]
            assert commits[number][1] <= at, f"a token of update {number} before its commit"
            assert answer["begin"] <= ends[number], f"a token of update {number} in a request that began after the next commit"
    spanning = sum(len(answer["versions"]) > 1 for answer in answers)
    assert spanning, "no answer spans an update"
    print(f"  versions: {sum(answer['tokens'] for answer in answers)} tokens of {len(answers)} answers name weights that were in use; "
          f"{spanning} answers span an update")


def run_streams(options):
    """Runs streams until the standard input is closed, and prints the times between tokens on the clock of the machine."""
    gaps, finished, failed, answers, is_open = [], [], [], [], True

    def stream(number):
        while is_open:
            prompt = [(at * 31 + number * 7) % 30_000 + 1 for at in range(128)]
            body = {"prompt": prompt, "max_tokens": options.output_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
                    "cache_salt": os.urandom(8).hex(), "return_weight_version": options.check_versions}
            request = urllib.request.Request(f"http://127.0.0.1:{HTTP}/v1/completions", json.dumps(body).encode(),
                                             {"content-type": "application/json"})
            last, done = None, False
            # The versions of the tokens in order, each with the arrival of its first token.
            answer = {"begin": time.perf_counter(), "versions": [], "tokens": 0, "is_finished": False}
            if options.check_versions:
                answers.append(answer)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    for line in response:
                        if line.startswith(b"data: [DONE]"):
                            done = True
                        elif line.startswith(b"data:"):
                            if b'"error"' in line:
                                raise OSError(line)
                            now = time.perf_counter()
                            if last is not None:
                                gaps.append((now, now - last))
                            last = now
                            if options.check_versions:
                                add_versions(answer, json.loads(line[len(b"data:"):]), now)
                        if not is_open:
                            return
                if not done:
                    raise OSError("the stream ended early")
                finished.append(number)
                answer["is_finished"] = True
            except (OSError, http.client.HTTPException) as error:
                failed.append(str(error))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(options.streams)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_open = False
    for thread in threads:
        thread.join(60)
    print(json.dumps({"finished": len(finished), "failed": failed, "gaps": gaps, "answers": answers}))


def add_versions(answer, event, now):
    for choice in event["choices"]:
        for version in choice.get("weight_versions") or []:
            answer["tokens"] += 1
            if not answer["versions"] or answer["versions"][-1][0] != version:
                answer["versions"].append((version, now))


def change(weights, number):
    """Gives the weights other bytes, and with them another version, for each number below 16,384."""
    # bf16 has 128 values from 1 on below 2.
    weights["model.norm.weight"][0] = 1 + number % 128 / 128
    weights["model.norm.weight"][1] = 1 + number // 128 / 128


def load(options, folder):
    import torch

    device = torch.device("cuda", options.trainer_gpu)
    config = write_config(folder / "model", options.size or "8b")
    weights = random_weights(config, 1, device)
    chunk, buffers = int(options.chunk_mib.split(",")[-1]), int((options.buffers or "2").split(",")[0])
    with Cluster(options, folder / "model", dummy=True) as cluster:
        updater = new_updater(options, str(folder / "trainer.sock"), chunk_bytes=chunk * MIB, buffers=buffers, in_flight=options.in_flight)
        change(weights, 0)
        commits = [(updater.push(weights)["weight_version"], 0, 0)]
        streams = Streams(options.streams, options.output_tokens, options.check_versions)
        time.sleep(4)
        updating = time.perf_counter()
        pauses, times, arriving, quiet = [], [], [], []
        for number in range(options.rounds):
            since = len(cluster.lines)
            change(weights, number + 1)
            update = updater.prepare(weights)
            committing = time.perf_counter()
            report = updater.commit(update)
            commits.append((report["weight_version"], committing, time.perf_counter()))
            pauses.append(report["nodes"][0].get("paused_ms", float("nan")))
            at = cluster.wait_index("received weights from a trainer", since)
            received, mapped = (logged(cluster.lines[at], name) for name in ("received_ms", "mapped_ms"))
            times.append(received)
            arriving.append((cluster.times[at] - (received - mapped) / 1e3, cluster.times[at]))
            # Contexts grow, and steps with them, so the baseline lies between the updates. Recomputation ends before.
            time.sleep(0.5)
            begin = time.perf_counter()
            time.sleep(0.3)
            quiet.append((begin, time.perf_counter()))
        ended = time.perf_counter()
        streams.stop()
        name = (f"{options.transport}, {buffers} x {chunk} MiB, {options.streams} streams of {options.output_tokens} tokens, "
                f"{options.rounds} updates, {options.in_flight}")
        print(f"{name}: {streams.finished} requests finished, {len(streams.failed)} failed {streams.failed[:3]}")
        for what, values in [("received ms", times), ("pause ms", pauses)]:
            values = sorted(values)
            print(f"  {what}: median {values[len(values) // 2]:.1f}, maximum {values[-1]:.1f}")
        for what, percentiles in [("between updates", streams.percentiles(*quiet)),
                                  ("while chunks arrive", streams.percentiles(*arriving)),
                                  ("with updates and commits", streams.percentiles((updating, ended)))]:
            print(f"  inter-token latency {what}, ms: p50 {percentiles[0]:.2f}, p99 {percentiles[1]:.2f}, p99.9 {percentiles[2]:.2f} of {percentiles[3]}")
        assert not streams.failed
        if options.check_versions:
            check_versions(streams.answers, commits, options.output_tokens)


def main():
    options = arguments()
    if options.mode in ("trainer", "streams"):
        return {"trainer": run_trainer, "streams": run_streams}[options.mode](options)
    with tempfile.TemporaryDirectory(prefix="baton-weights-") as folder:
        {"check": check, "bench": bench, "load": load}[options.mode](options, pathlib.Path(folder))


if __name__ == "__main__":
    main()
