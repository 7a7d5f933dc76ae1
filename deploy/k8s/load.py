"""Load on a router: greedy streams whose text is compared with the golden outputs of the f32 oracle."""

import http.client
import json
import pathlib
import select
import threading
import time

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "integration-tests/golden/smollm2_greedy.json"
TIMEOUT_SECONDS = 120


def golden():
    """Returns prompt, output text and number of output tokens of every golden run."""
    return [(run["prompt"], run["output_text"], len(run["output_ids"])) for run in json.loads(GOLDEN.read_text())["runs"]]


def stream(connection, model, prompt, text, tokens, headers=None):
    """Streams one completion. Returns the arrival time of every event. Raises if the request failed or the text differs."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "skip_special_tokens": False, "stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    if response.status != 200:
        message = f"status {response.status}: {response.read().decode(errors='replace')}"
        raise Rejected(float(response.getheader("retry-after", 0)), message)
    times, found, usage = [], "", None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"error after {len(found)} characters: {event['error']}")
        found += "".join(choice["text"] for choice in event["choices"])
        usage = event.get("usage") or usage
        times.append(time.monotonic())
    if found != text or usage["completion_tokens"] != tokens:
        raise RuntimeError(f"{usage} tokens {found!r}, expected {tokens} tokens {text!r}")
    return times


class Rejected(RuntimeError):
    """The server asks to retry after this many seconds."""

    def __init__(self, seconds, message):
        super().__init__(message)
        self.seconds = seconds


class Load:
    """Eight streams on connections that they keep, and two requests a second on new connections."""

    def __init__(self, host, model, streams=8, rate=2):
        self.host, self.model, self.rate = host, model, rate
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.finished, self.failures, self.gap, self.first = 0, [], 0.0, 0.0
        self.runs = golden()
        self.threads = [threading.Thread(target=self.keep_streaming, args=(index,)) for index in range(streams)]
        self.threads.append(threading.Thread(target=self.send_at_rate))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def connect(self):
        return http.client.HTTPConnection(self.host, timeout=TIMEOUT_SECONDS)

    def request(self, connection, index):
        start = time.monotonic()
        try:
            times = stream(connection, self.model, *self.runs[index % len(self.runs)])
        except Exception as error:
            # The next request of this stream reconnects.
            connection.close()
            with self.lock:
                self.failures.append(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}"[:300])
            # Like other clients, do not retry earlier than asked. Early retries would load the machine.
            self.stopping.wait(getattr(error, "seconds", 0))
            return
        with self.lock:
            self.finished += 1
            self.first = max(self.first, times[0] - start)
            self.gap = max([self.gap, *(after - before for before, after in zip(times, times[1:]))])

    def keep_streaming(self, index):
        connection = self.connect()
        while not self.stopping.is_set():
            # Like other HTTP clients, check whether the server has closed the connection before reusing it.
            if connection.sock and select.select([connection.sock], [], [], 0)[0]:
                connection.close()
            self.request(connection, index)
            index += 1
        connection.close()

    def send_at_rate(self):
        pending, index = [], 0
        while not self.stopping.wait(1 / self.rate):
            pending.append(threading.Thread(target=self.request, args=(self.connect(), index)))
            pending[-1].start()
            index += 1
        for thread in pending:
            thread.join()
