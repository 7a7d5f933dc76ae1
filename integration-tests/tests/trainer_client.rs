//! The trainer's client for weight updates, without nodes: answers that it cannot read, routers
//! that do not answer, strangers that connect to the trainer, and plans and digests that nodes
//! compare with their own.

use std::process::{Command, ExitCode};

use anyhow::Result;
use integration_tests::command::output;
use kernels::digest::{WeightRuns, of_weight};
use weight_transfer::{Plan, Tensor, WeightChunk};

/// Name, element type, shape and bytes of a tensor.
type Declared = (String, String, Vec<u64>, u64);
/// Tensor, first byte and number of bytes of each piece of a chunk.
type Pieces = Vec<(usize, u64, u64)>;

/// The first lines of every script: the trainer's client, and `serve` for a router that answers as
/// the script says.
const HEAD: &str = r#"
import http.server, json, sys, tempfile, threading, types
sys.path.insert(0, sys.argv[1])
import baton_weights
from baton_weights import OutcomeUnknown, UpdateError, WeightUpdater
folder = tempfile.TemporaryDirectory()
# Calls answer_to(method, path), which returns status and body, or None to close the connection without an answer.
def serve(answer_to):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answer_to(self.command, self.path)
            if answer is not None:
                self.send_response(answer[0])
                self.end_headers()
                self.wfile.write(answer[1])
        do_POST = do_GET
        def log_message(self, *args):
            pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"
"#;

/// Runs a Python script that can use the trainer's client. Returns what it prints.
fn run_with_client(script: &str) -> Result<String> {
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/../services/weight-transfer/client");
    let mut python = Command::new("python3");
    let output = output(python.args(["-c", &format!("{HEAD}{script}"), client]))?;
    assert!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// A proxy or another service at the address of the router.
fn trainer_client_reports_answers_that_it_cannot_read() -> Result<()> {
    let script = r#"
server, url = serve(lambda method, path: (200, answer))
updater = WeightUpdater(url, folder.name, ".")
for answer in (b"<html>", b"", b"{}", b'{"update": null}', b'{"update": {}}'):
    try:
        updater.push({})
        sys.exit(f"{answer} was accepted")
    except UpdateError as error:
        print(error)
server.shutdown()
server.server_close()
try:
    updater.abort("07")
except UpdateError as error:
    print(error)
"#;
    let text = run_with_client(script)?;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 6, "{text}");
    assert!(lines[..3].iter().all(|line| line.contains("expected JSON with the field update")));
    assert!(lines[3..5].iter().all(|line| line.contains("expected the address of router.admin")));
    assert!(lines[5].starts_with("cannot reach the router's admin API"), "{text}");
    Ok(())
}

fn trainer_client_waits_for_an_update_while_the_router_does_not_answer() -> Result<()> {
    let script = r#"
polls, is_lost, knows = 0, False, True
def answer_to(method, path):
    global polls
    if method == "GET":
        polls += 1
        if is_lost or polls % 2 == 1:
            return None
    phase = "preparing" if method == "POST" else "committed"
    # Without the id the router reports an update of another model.
    found = "08" if path == "/v1/weights" else "07"
    update = {"id": found, "phase": phase, "path": "/new"} if knows or method == "POST" else None
    return 200, json.dumps({"update": update}).encode()
server, url = serve(answer_to)
updater = WeightUpdater(url, folder.name, ".")
print(updater.push({})["phase"], polls)
knows = False
try:
    updater.push({})
except OutcomeUnknown as error:
    print(error)
is_lost, baton_weights.GRACE_SECONDS, updater.timeout = True, 0, 0.2
try:
    updater.push({})
except OutcomeUnknown as error:
    print(error)
"#;
    let text = run_with_client(script)?;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(lines[0], "committed 4");
    assert_eq!(lines[1], "the router does not know update 07: None");
    assert!(lines[2].starts_with("update 07 is not prepared within 0.2 s: cannot reach"), "{text}");
    Ok(())
}

/// An error about a poll, or from a proxy, does not say that the update failed. A rejection of the
/// router does.
fn trainer_client_tells_rejected_updates_from_those_with_an_unknown_outcome() -> Result<()> {
    let script = r#"
import contextlib
def update(phase):
    return 200, json.dumps({"update": {"id": "07", "phase": phase, "path": "/new", "nodes": [{}]}}).encode()
def error(status, message):
    return status, json.dumps({"error": {"message": message}}).encode()
server, url = serve(lambda method, path: answers.pop(0))
updater = WeightUpdater(url, folder.name, ".")
polls = [error(503, "the router has too many connections"), error(429, "busy"), (502, b"<html>"), (200, b"<html>")]
answers = [update("preparing"), *polls, update("prepared"), *polls, update("committed")]
print(updater.push({})["phase"])
for status, answer in [error(409, "another update runs"), error(503, "no node is up"), (404, b"<html>"), (502, b"<html>"),
                       (504, b"")]:
    answers = [(status, answer)]
    try:
        updater.push({})
    except UpdateError as failed:
        print(status, type(failed).__name__)

class Sending:
    address = "127.0.0.1:1/token"
    def send(self, nodes):
        raise MemoryError("no memory")
    def close(self):
        pass
updater = WeightUpdater(url, transport="nccl", host="127.0.0.1")
updater.sender = types.SimpleNamespace(listening=lambda state_dict: contextlib.nullcontext(Sending()))
answers = [update("preparing"), update("prepared"), update("committed")]
print(updater.push({})["phase"])
assert not answers, answers
"#;
    let expected = "committed\n409 UpdateError\n503 UpdateError\n404 UpdateError\n\
                    502 OutcomeUnknown\n504 OutcomeUnknown\ncommitted\n";
    assert_eq!(run_with_client(script)?, expected);
    Ok(())
}

/// A trainer gathers one tensor after the other: each file is written before the tensors of the
/// next file are gathered.
fn trainer_client_writes_an_iterable_file_by_file() -> Result<()> {
    let script = r#"
import os, struct
baton_weights.SHARD_BYTES = 100
written = []
def gathered(names):
    for name, dtype, size in names:
        written.append(len([file for file in os.listdir(folder.name) if file.startswith("model-")]))
        yield name, (dtype, (size,), bytes([len(written)]) * size)
tensors = [("a", "F8_E4M3", 60), ("b", "BF16", 40), ("c", "F32", 8), ("d", "F16", 200), ("e", "F32", 4)]
baton_weights.write_shards(folder.name, gathered(tensors))
print(written)
index = json.load(open(f"{folder.name}/model.safetensors.index.json"))["weight_map"]
for number, (name, dtype, size) in enumerate(tensors, 1):
    data = open(f"{folder.name}/{index[name]}", "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = entry["data_offsets"]
    assert data[8 + length + begin : 8 + length + end] == bytes([number]) * size
    print(index[name], entry["dtype"], entry["shape"])
for wrong in (lambda: baton_weights.write_shards(folder.name, gathered(tensors[:1] * 2)),
              lambda: WeightUpdater("http://127.0.0.1:1", transport="ipc", socket="/s").push(iter([]))):
    try:
        wrong()
    except UpdateError as error:
        print(error)
"#;
    let text = run_with_client(script)?;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "[0, 0, 0, 1, 2]");
    let wanted = [
        "model-00001.safetensors F8_E4M3 [60]",
        "model-00001.safetensors BF16 [40]",
        "model-00002.safetensors F32 [8]",
        "model-00003.safetensors F16 [200]",
        "model-00004.safetensors F32 [4]",
        "tensor a was given twice; expected each name once",
    ];
    assert_eq!(lines[1..7], wanted);
    assert!(lines[7].contains("expected one, or an iterable with transport disk"), "{text}");
    Ok(())
}

/// Trainer and nodes cut an update into chunks independently: a chunk has the same bytes on both
/// sides, and both sides compute the same hash of the plan.
fn trainer_client_has_the_plan_of_the_nodes() -> Result<()> {
    let script = r#"
import random
numbers = random.Random(7)
for case in range(500):
    sizes = [numbers.choice([0, 1, numbers.randrange(1, 9), numbers.randrange(1, 200)]) for _ in range(numbers.randrange(1, 12))]
    sizes.append(1)
    chunk_bytes = numbers.choice([1, 8, numbers.randrange(1, 300)])
    shapes = [numbers.choice([[], [size], [2, size, 0]]) for size in sizes]
    tensors = [{"name": f"gr\u00f6\u00dfe {index}", "dtype": "U8", "shape": shape} for index, shape in enumerate(shapes)]
    chunks = baton_weights.cut(sizes, chunk_bytes)
    declared = [[*tensor.values(), size] for tensor, size in zip(tensors, sizes)]
    print(json.dumps([declared, chunk_bytes, chunks, baton_weights.plan_hash(tensors, chunks)]))
"#;
    let text = run_with_client(script)?;
    assert_eq!(text.lines().count(), 500);
    for line in text.lines() {
        let (tensors, chunk_bytes, cut, hash): (Vec<Declared>, u64, Vec<Pieces>, String) =
            serde_json::from_str(line)?;
        let tensor = |(name, dtype, shape, bytes): Declared| Tensor { name, dtype, shape, bytes };
        let plan = Plan::new(tensors.into_iter().map(tensor).collect(), chunk_bytes)?;
        let pieces = |chunk: &WeightChunk| -> Pieces {
            let pieces = chunk.pieces.iter();
            pieces.map(|it| (it.tensor, it.range.start, it.range.end - it.range.start)).collect()
        };
        let chunks: Vec<Pieces> = plan.chunks().iter().map(pieces).collect();
        assert_eq!(cut, chunks, "{line}");
        assert_eq!(hash, format!("{:032x}", plan.trainer_hash()), "{line}");
    }
    Ok(())
}

/// Compares the digests of lines with bytes and a digest in JSON.
fn assert_digests(text: &str, count: usize) -> Result<()> {
    assert_eq!(text.lines().count(), count);
    for line in text.lines() {
        let (data, digest): (Vec<u8>, u64) = serde_json::from_str(line)?;
        let bytes = data.len();
        let whole = WeightRuns { runs: 1, run_bytes: bytes, run_stride: bytes, first: 0 };
        assert_eq!(digest, of_weight(&whole, &data), "{line}");
    }
    Ok(())
}

fn trainer_client_has_the_terms_of_the_nodes_digests() -> Result<()> {
    let script = r#"
import random, struct
numbers = random.Random(7)
for count in range(40):
    data = numbers.randbytes(8 * count)
    words = (word for (word,) in struct.iter_unpack("<Q", data))
    digest = sum(baton_weights.terms(word, place) for place, word in enumerate(words))
    print(json.dumps([list(data), digest % (1 << 64)]))
"#;
    assert_digests(&run_with_client(script)?, 40)
}

/// The client's operations on tensors, in pieces, also of tensors that begin inside of a word.
fn trainer_client_has_the_digests_of_the_nodes() -> Result<()> {
    let mut import = Command::new("python3");
    if !output(import.args(["-c", "import torch"]))?.status.success() {
        test_harness::skip("python3 has no torch");
    }
    let script = r#"
import random
import torch
from baton_weights import terms, words_of
numbers, places = random.Random(7), torch.arange(1 << 10)
for count in range(0, 400, 3):
    data = list(numbers.randbytes(8 * count))
    begin, piece_bytes = numbers.choice([0, 1, 2, 8]), numbers.choice([8, 64, 1 << 10])
    source = torch.tensor([0] * begin + data, dtype=torch.uint8)[begin:]
    sums = [terms(words, places[: len(words)], first=first).sum() for first, words in words_of(source, piece_bytes)]
    print(json.dumps([data, sum(map(int, sums)) % (1 << 64)]))
"#;
    assert_digests(&run_with_client(script)?, 134)
}

/// Strangers reset, leave, stay silent, or send another token. Then the update fails, and the node
/// must not wait for the trainer.
fn trainer_ignores_strangers_and_leaves_nodes_when_it_fails() -> Result<()> {
    let script = r#"
import socket, struct, time
from baton_weights import Sender, Sending
Sending.TOKEN_SECONDS = 0.1
sender = Sender("127.0.0.1", 1 << 20, 2, None)
sending = Sending.__new__(Sending)
sending.sender, token, left, late = sender, sender.token.encode(), [], []
def connect(token):
    connection = socket.create_connection(sender.listener.getsockname())
    connection.sendall(token)
    return connection
def fail(nodes):
    silent, other = connect(b""), connect(b"0" * 32)
    connect(b"").close()
    reset = connect(b"")
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    node = connect(token)
    assert not sending.accept(nodes, time.monotonic() + 30)
    assert len(sender.connections) == 1, sender.connections
    for stranger in (silent, other):
        assert stranger.recv(1) == b"", "the trainer closes connections of strangers"
    def leave():
        left.append(node.recv(1))
    thread = threading.Thread(target=leave)
    thread.start()
    left.append(thread)
    late.append(connect(token))
    raise MemoryError("no memory for buffers")
sending.send = fail
updater = WeightUpdater("http://127.0.0.1:1", transport="nccl", host="127.0.0.1")
updater.sender = types.SimpleNamespace(listening=lambda state_dict: sending)
updater.begin = lambda *arguments: {"id": "07", "nodes": [{}]}
def wait(update, phases):
    left[0].join(10)
    assert left[1:] == [b""], "the node waits for a trainer that has failed"
    raise UpdateError("the node has lost its trainer")
updater.wait = wait
try:
    updater.push({})
except UpdateError as error:
    print(error)
try:
    assert late[0].recv(1) == b"", "a node that connected too late waits for the failed update"
except ConnectionResetError:
    pass
with sending:
    assert sender.token.encode() != token, "a late node of the failed update reaches the next one"
    token = sender.token.encode()
    try:
        sending.accept(3, time.monotonic() + 0.01)
    except UpdateError as error:
        print(error)
class Communicator:
    def abort(self):
        print("left")
def accepted():
    return sending.accept(2, time.monotonic() + 30)
nodes = [connect(token), connect(token)]
assert not accepted()
sender.nccl, ranks = Communicator(), list(sender.connections)
for node in reversed(nodes):
    node.sendall(token)
assert accepted() and sender.connections == ranks, "the same nodes use the communicator again"
nodes.pop().close()
nodes.append(connect(token))
nodes[0].sendall(token)
assert not accepted() and set(sender.connections) != set(ranks), "another node needs another communicator"
sender.close()
assert [node.recv(1) for node in nodes] == [b"", b""], "the nodes learn that the trainer has left"
"#;
    let text = run_with_client(script)?;
    let expected = "the node has lost its trainer: no memory for buffers\n\
                    0 of 3 nodes have connected within 60 s\n\
                    left\n";
    assert_eq!(text, expected);
    Ok(())
}

fn main() -> ExitCode {
    test_harness::main(
        &[],
        test_harness::tests![
            trainer_client_reports_answers_that_it_cannot_read,
            trainer_client_waits_for_an_update_while_the_router_does_not_answer,
            trainer_client_tells_rejected_updates_from_those_with_an_unknown_outcome,
            trainer_client_writes_an_iterable_file_by_file,
            trainer_client_has_the_plan_of_the_nodes,
            trainer_client_has_the_terms_of_the_nodes_digests,
            trainer_client_has_the_digests_of_the_nodes,
            trainer_ignores_strangers_and_leaves_nodes_when_it_fails,
        ],
    )
}
