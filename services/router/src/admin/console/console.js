// The console of an operator: shows the answers of router.admin, and calls its routes. Texts of the cluster reach
// the page as text nodes only, never as markup.
"use strict";

const UPDATE_MS = 2000;
const ANSWER_MAX_MS = 15000;

// The operator's key. It leaves memory with the page.
let key = null;
// The id of the explained request; null while none is explained.
let explainedId = null;

const byId = (id) => document.getElementById(id);

class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Returns the JSON answer of a route.
async function call(method, path) {
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  let answer;
  try {
    answer = await fetch(path, { method, headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MAX_MS) });
  } catch (error) {
    throw new CallError(0, `the router does not answer (${error.message})`);
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) {
    throw new CallError(answer.status, body?.error?.message ?? `status ${answer.status}`);
  }
  return body;
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Sets a text only if it differs, so that screen readers do not repeat it.
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Makes the rows of a table show the items. Rows keep their elements and thus the focus. A cell is a text, or a
// function that fills its td.
function fillRows(body, items, idOf, cellsOf) {
  const rows = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  items.forEach((item, index) => {
    const id = idOf(item);
    const row = rows.get(id) ?? element("tr");
    rows.delete(id);
    row.dataset.id = id;
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    cellsOf(item).forEach((cell, column) => {
      const td = row.cells[column] ?? row.appendChild(element("td"));
      if (typeof cell === "function") cell(td);
      else setText(td, cell ?? "");
    });
  });
  rows.forEach((row) => row.remove());
}

const count = (value) => (td) => {
  td.className = "number";
  setText(td, value === null || value === undefined ? "–" : value.toLocaleString("en"));
};

const milliseconds = (value) => {
  if (value === null || value === undefined) return "unknown";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(value < 10 ? 2 : 0)} ms`;
};

const time = (value) => (td) => {
  td.className = "number";
  setText(td, milliseconds(value));
};

const state = (className, text) => (td) => {
  td.className = className;
  setText(td, text);
};

// A button that stays the same element over updates.
const button = (label, act, className) => (td) => {
  let made = td.querySelector("button");
  if (made === null) {
    made = element("button", "", className);
    made.type = "button";
    td.append(made);
  }
  setText(made, label);
  made.onclick = () => act(made);
};

const share = (part, whole) => (td) => {
  if (whole === 0) return setText(td, "–");
  if (td.firstChild?.tagName !== "METER") {
    td.replaceChildren(element("meter"), element("span"));
    td.firstChild.setAttribute("aria-hidden", "true");
  }
  td.firstChild.value = part / whole;
  setText(td.lastChild, `${Math.round((100 * part) / whole)}% of ${whole.toLocaleString("en")}`);
};

// The buttons resolve the promise: a close event may arrive after the dialog opened again. After Escape it stays
// unresolved, so nothing happens.
function confirmed(text, action) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = action;
  return new Promise((resolve) => {
    const answer = (yes) => () => { dialog.close(); resolve(yes); };
    byId("confirm-yes").onclick = answer(true);
    byId("confirm-no").onclick = answer(false);
    dialog.showModal();
  });
}

// Asks, calls a route that changes the cluster, and shows the outcome.
async function act(question, action, path, outcome) {
  if (!(await confirmed(question, action))) return;
  try {
    const answer = await call("POST", path);
    showError(null);
    // An update shows its own state.
    await update();
    setText(byId("state"), outcome(answer));
  } catch (error) {
    showError(error);
    await update();
  }
}

const nameOf = (node) => node.node ?? node.grpc;

// Returns class and text of a node's state.
function stateOf(node) {
  if (node.health !== "up") return ["bad", `${node.health}: ${node.reason}`];
  if (node.excluded) return ["bad", `excluded: ${node.excluded}`];
  if (node.pause) return ["warn", node.pause];
  return ["good", "up"];
}

// Returns class and text of a node's drain. A drained node has no sequence left, so it may be stopped.
function drainOf(node) {
  if (!node.draining) return ["empty", "–"];
  return node.running + node.waiting + node.in_flight === 0 ? ["good", "drained"] : ["warn", "draining"];
}

function drainButton(node) {
  // Nodes of different hosts may have the same name, so the calls name the URL.
  const path = `/v1/nodes/${encodeURIComponent(node.grpc)}`;
  const name = nameOf(node);
  if (node.draining) {
    return button("Undrain", () =>
      act(`Let ${name} accept requests again?`, "Undrain", `${path}/undrain`, () => `${name} accepts requests`));
  }
  return button("Drain", () =>
    act(`Drain ${name}? It finishes its requests and accepts no new ones. Other nodes take over.`, "Drain",
      `${path}/drain`, (answer) => `${name} drains, ${answer.attempts_in_flight} attempts in flight`));
}

function showNodes({ nodes, links, links_left_out: leftOut }) {
  const up = nodes.filter((node) => stateOf(node)[1] === "up" && !node.draining);
  const running = nodes.reduce((sum, node) => sum + node.running, 0);
  const waiting = nodes.reduce((sum, node) => sum + node.waiting, 0);
  setText(byId("nodes-summary"),
    `${up.length} of ${nodes.length} nodes serve, with ${running} running and ${waiting} waiting sequences.`);
  fillRows(byId("node-rows"), nodes, (node) => node.grpc, (node) => [
    (td) => { setText(td, nameOf(node)); td.title = node.grpc; },
    node.both_roles ? `${node.role}, fluid` : node.role,
    state(...stateOf(node)),
    state(...drainOf(node)),
    count(node.running),
    count(node.waiting),
    share(node.prefilling, node.running),
    count(node.pending_prompt_tokens),
    share(node.blocks - node.blocks_free - node.blocks_cached, node.blocks),
    share(node.blocks_cached, node.blocks),
    count(node.in_flight),
    node.model ?? "–",
    drainButton(node),
  ]);
  const names = new Map(nodes.map((node) => [node.grpc, nameOf(node)]));
  setText(byId("links-summary"), links.length === 0
    ? "No transfer of KV was measured yet."
    : `The router measured the transfers of ${links.length + leftOut} links`
      + (leftOut > 0 ? `; the table has ${links.length} of them: excluded ones first, then the slowest.` : "."));
  fillRows(byId("link-rows"), links, (link) => `${link.prefill} ${link.decode}`, (link) => [
    names.get(link.prefill) ?? link.prefill,
    names.get(link.decode) ?? link.decode,
    // µs per token equal ms per 1,000 tokens.
    time(link.token_us),
    link.excluded ? state("bad", "excluded: transfers failed") : state("good", "in use"),
  ]);
}

function showRequests({ requests, running, ended, oldest_s: oldest }) {
  const since = oldest === null ? "" : `, the oldest from ${Math.round(oldest)} s ago`;
  setText(byId("requests-summary"), `This router keeps its ${running} running requests and the last ${ended} that ended${since}.`);
  fillRows(byId("request-rows"), requests, (request) => request.request_id, (request) => [
    new Date(request.received_unix_ms).toLocaleTimeString(),
    button(request.label ?? request.request_id.slice(0, 12), () => explain(request.request_id), "link"),
    request.model,
    request.api,
    requestState(request),
    count(request.prompt_tokens),
    count(request.completion_tokens),
    time(request.ttft_ms),
    time(request.duration_ms),
  ]);
}

function requestState(request) {
  if (request.error) return state("bad", request.end);
  if (request.end === "running") return state("warn", request.waits_for ? "waiting" : "running");
  return state("good", request.end);
}

// Returns the stages with start time, colour and node. A stage without overlap starts at the end of the stage before.
// Hand-over and decode start no earlier than the attempt's first token: the time to this token also contains RPCs that
// belong to no stage.
function course(request) {
  let at = 0;
  let picked = 0;
  let reserved = 0;
  let last = null;
  return request.stages.map((stage) => {
    const attempt = request.attempts.find((it) => it.number === stage.attempt && it.choice === request.choice);
    const node = (role) => attempt?.nodes.find((it) => it.role === role)?.node;
    if (attempt && stage.attempt !== last && stage.stage !== "wait" && stage.stage !== "earlier attempts") {
      last = stage.attempt;
      picked = reserved = at;
    }
    const toToken = attempt?.ttft_ms;
    if ((stage.stage === "hand-over" || stage.stage === "decode") && typeof toToken === "number") {
      at = Math.max(at, picked + toToken);
    }
    const ms = stage.ms ?? 0;
    let start = at;
    if (stage.stage === "reserve") reserved = picked + ms;
    // A transfer begins with RESERVE and ends with the last block.
    if (stage.stage === "transfer") start = reserved;
    if (!stage.overlaps) at += ms;
    const places = {
      reserve: ["decode", stage.node], queue: ["prefill", stage.node], prefill: ["prefill", stage.node],
      "until first token": ["prefill", "nodes"],
      transfer: ["transfer", `${node("prefill")} to ${node("decode")}`],
      "hand-over": ["transfer", `${node("prefill")} to ${node("decode")}`],
      decode: ["decode", node("decode")],
    };
    const [colour, where] = places[stage.stage] ?? ["router", "router"];
    return { name: stage.stage, colour, where: where ?? "router", start, ms: stage.ms };
  });
}

function showExplained(request) {
  setText(byId("explained-title"), `Request ${request.label ?? request.request_id}`);
  const parts = [
    `${request.api} of ${request.model}: ${request.end} after ${milliseconds(request.duration_ms)}`,
    `${request.prompt_tokens} prompt tokens, ${request.completion_tokens ?? "unknown"} output tokens`,
    `first token after ${milliseconds(request.ttft_ms)}`,
    `${milliseconds(request.unaccounted_ms)} outside the stages`,
    `id ${request.request_id}`,
  ];
  if (request.trace_id) parts.push(`trace ${request.trace_id}`);
  if (request.error) parts.push(`error: ${request.error}`);
  if (request.waits_for) parts.push(`waits: ${request.waits_for}`);
  setText(byId("explained-summary"), `${parts.join("; ")}.`);
  const whole = Math.max(request.duration_ms, 0.001);
  const stages = course(request).map((stage, index) => ({ ...stage, id: `${index} ${stage.name}` }));
  fillRows(byId("stage-rows"), stages, (stage) => stage.id, (stage) => [
    stage.name,
    stage.where,
    time(stage.ms),
    (td) => {
      const bar = td.firstChild ?? td.appendChild(element("div"));
      bar.className = `bar at-${stage.colour}`;
      bar.hidden = stage.ms === null;
      const start = Math.min(stage.start / whole, 1);
      bar.style.marginLeft = `${100 * start}%`;
      bar.style.width = `${100 * Math.min((stage.ms ?? 0) / whole, 1 - start)}%`;
    },
  ]);
  byId("attempts").replaceChildren(...request.attempts.map(attemptItem));
  byId("explained").hidden = false;
}

function attemptItem(attempt) {
  const item = element("li");
  const way = attempt.disaggregated ? "disaggregated" : "local prefill";
  item.append(element("p", `${way}: ${attempt.reason}; outcome ${attempt.outcome}`
    + (attempt.failure ? `: ${attempt.failure}` : "")));
  const cached = attempt.nodes.map((node) =>
    `${node.role} node ${node.node}: ${node.cached_expected} cached tokens expected, ${node.cached_found ?? "unknown"} found`);
  if (attempt.waited_for) cached.unshift(`waited before: ${attempt.waited_for}`);
  item.append(element("p", `${cached.join("; ")}; first token predicted after ${milliseconds(attempt.predicted_ttft_ms)}, `
    + `measured after ${milliseconds(attempt.ttft_ms)}`));
  const list = element("ul");
  attempt.options.forEach((option, index) => {
    const nodes = option.prefill_node ? `${option.prefill_node} to ${option.decode_node}` : option.decode_node;
    const cost = option.cost_ms === undefined ? "not predicted" : `predicted cost ${milliseconds(option.cost_ms)}`;
    list.append(element("li", `${index === 0 ? "chosen" : "other option"}: ${nodes}, ${cost}`));
  });
  attempt.ineligible.forEach((node) =>
    list.append(element("li", `not eligible: ${node.role} node ${node.node}: ${node.reason}`)));
  const leftOut = attempt.options_left_out + attempt.ineligible_left_out;
  if (leftOut > 0) list.append(element("li", `and ${leftOut} other options and nodes`));
  item.append(list);
  return item;
}

async function explain(id) {
  try {
    const { requests } = await call("GET", `/v1/explain/${encodeURIComponent(id)}`);
    explainedId = requests[0].request_id;
    showExplained(requests[0]);
    byId("explained-title").focus();
    showError(null);
  } catch (error) {
    showError(error);
  }
}

function showWeights({ update: last, nodes }) {
  const parts = [];
  if (last) {
    parts.push(`Update ${last.label || last.id} of ${last.model}: ${last.phase}`, `path ${last.path}`);
    if (last.weight_version) parts.push(`weight version ${last.weight_version}`);
    if (last.reason) parts.push(`reason: ${last.reason}`);
    if (last.missed.length > 0) parts.push(`catching up: ${last.missed.join(", ")}`);
  }
  setText(byId("update-summary"), last ? `${parts.join("; ")}.` : "No update of weights ran since this router started.");
  const states = new Map((last?.nodes ?? []).map((node) => [node.node, node]));
  const rows = nodes.map((node, index) => ({ ...node, id: `${index} ${node.node}` }));
  fillRows(byId("weight-rows"), rows, (node) => node.id, (node) => {
    const part = states.get(node.node);
    const paused = part?.paused_ms === undefined ? "" : `, paused for ${milliseconds(part.paused_ms)}`;
    return [
      node.node, node.role, node.model, node.weight_version,
      node.pause ? state("warn", node.pause) : node.catches_up ? state("warn", "catching up") : state("good", "serves"),
      part ? `${part.state}${paused}` : "–",
    ];
  });
  const models = [...new Set(nodes.map((node) => node.model))];
  const select = byId("pause-model");
  if ([...select.options].map((option) => option.value).join("\n") !== models.join("\n")) {
    select.replaceChildren(...models.map((model) => element("option", model)));
  }
}

function showError(error) {
  const box = byId("error");
  box.hidden = error === null;
  setText(box, error === null ? "" : error.message);
}

let updating = null;

// Reads everything once. Calls while an update runs wait for this update.
function update() {
  updating ??= readAll().finally(() => { updating = null; });
  return updating;
}

async function readAll() {
  try {
    const [nodes, requests, weights] = await Promise.all([
      call("GET", "/v1/nodes"),
      call("GET", `/v1/explain?${byId("selection").value}`),
      call("GET", "/v1/weights"),
    ]);
    byId("key-form").hidden = true;
    showNodes(nodes);
    showRequests(requests);
    showWeights(weights);
    const explained = requests.requests.find((it) => it.request_id === explainedId);
    if (explained) showExplained(explained);
    byId("state").dataset.failed = "";
    setText(byId("state"), `Read at ${new Date().toLocaleTimeString()}`);
  } catch (error) {
    if (error.status === 401) return askForKey();
    setText(byId("state"), `Not updated: ${error.message}`);
  }
}

function askForKey() {
  setText(byId("state"), key === null ? "A key is needed" : "The router does not know this key");
  key = null;
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  update();
});

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("id").value.trim();
  if (id) explain(id);
  else update();
});

byId("selection").addEventListener("change", () => update());

byId("close").addEventListener("click", () => {
  explainedId = null;
  byId("explained").hidden = true;
  byId("requests").scrollIntoView();
});

byId("pause-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const model = byId("pause-model").value;
  const query = new URLSearchParams({ model, mode: byId("pause-mode").value, timeout_s: byId("pause-seconds").value });
  act(`Pause all nodes of ${model}? They serve no request until you resume them, or for ${byId("pause-seconds").value} s.`,
    "Pause", `/v1/weights/pause?${query}`, () => `${model} is paused`);
});

byId("resume").addEventListener("click", () => {
  const model = byId("pause-model").value;
  act(`Let all nodes of ${model} serve again?`, "Resume", `/v1/weights/resume?${new URLSearchParams({ model })}`,
    () => `${model} serves again`);
});

// A hidden page, or a page that waits for a key, sends no requests.
setInterval(() => {
  if (byId("updates").checked && !document.hidden && byId("key-form").hidden) update();
}, UPDATE_MS);
update();
