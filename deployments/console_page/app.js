// The page: a form, an answer as it comes, and the state of the system every second.

import { Answer, AnswerView, showAcceptance, showFigures, showLegend } from "./answer.js";
import { ApiError, getState, hasKey, isOfThisKey, streamed, useKey } from "./api.js";
import { showPace } from "./charts.js";
import { byId, el, enable, knowDrafters, show } from "./dom.js";
import { showHealth } from "./health.js";
import { TreeView } from "./tree.js";

const POLL_MS = 1000;
const form = byId("form");
const dialog = byId("key-dialog");
let answer = new Answer({ tpot_ms: null, ttft_ms: null });
let running = null; // AbortController of the answer that comes
let ahead = 0; // characters that steps told of and no text yet: a thought, or what might have begun one
let drafters = [];
let wantsKey = false; // the server asked for a key, and none was given since

const tree = new TreeView((index) => text.mark(index));
const text = new AnswerView((index) => tree.show(index));

// -- the request ----------------------------------------------------------------------------------

const SAMPLING = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
  "frequency_penalty", "repetition_penalty", "seed"];

function request(fields) {
  const given = (name) => (fields.get(name)?.trim() ? Number(fields.get(name)) : null);
  const body = { stream: true, stream_options: { include_usage: true }, speculation: { trace: true } };
  for (const name of SAMPLING) if (given(name) !== null) body[name] = given(name);
  if (fields.get("stop")) body.stop = [fields.get("stop")];
  if (fields.get("model")) body.model = fields.get("model");
  if (fields.get("tier")) body.service_tier = fields.get("tier");
  const objective = { tpot_ms: given("tpot_ms"), ttft_ms: given("ttft_ms") };
  const slo = Object.entries(objective).filter(([, value]) => value !== null);
  if (slo.length) body.slo = Object.fromEntries(slo);
  const chosen = fields.getAll("drafter");
  if (!chosen.length && drafters.length) body.speculation.mode = "off";
  else if (chosen.length < drafters.length) body.speculation.drafters = chosen;
  if (given("draft_tokens") !== null) body.speculation.max_tokens = given("draft_tokens");
  if (fields.get("mode") === "chat") {
    return ["/v1/chat/completions", { ...body, logprobs: true, messages: [{ role: "user", content: fields.get("prompt") }] }, objective];
  }
  return ["/v1/completions", { ...body, logprobs: 0, prompt: fields.get("prompt") }, objective];
}

async function send() {
  if (running || !form.reportValidity()) return;
  const [path, body, objective] = request(new FormData(form));
  answer = new Answer(objective);
  ahead = 0;
  running = new AbortController();
  text.clear();
  tree.clear(answer.steps);
  tell("");
  redraw();
  enable([[byId("send"), false], [byId("stop"), true]], byId("answer"));
  byId("answer").setAttribute("aria-busy", "true");
  byId("answer-status").textContent = "waiting for the first token";
  try {
    for await (const chunk of streamed(path, body, running.signal)) take(chunk);
    byId("answer-status").textContent = `done: ${answer.tokens.length} tokens in ${answer.steps.length} steps`;
  } catch (error) {
    if (error.name === "AbortError") byId("answer-status").textContent = "stopped";
    else {
      byId("answer-status").textContent = "";
      refuse(error);
    }
  } finally {
    running = null;
    enable([[byId("send"), true], [byId("stop"), false]], byId("answer"));
    byId("answer").removeAttribute("aria-busy");
    redraw();
  }
}

function take(chunk) {
  const choice = chunk.choices[0];
  const said = choice?.delta?.content ?? choice?.text ?? "";
  let told = "";
  if (chunk.flotilla) {
    const tokens = answer.add(chunk.flotilla);
    text.append(tokens);
    told = tokens.map((token) => token.text).join("");
    tree.grown();
    if (answer.steps.length === 1) byId("answer-status").textContent = "answering"; // announced once
  }
  const untold = said.length - told.length - ahead;
  if (untold > 0) text.appendText(said.slice(-untold));
  ahead = said ? 0 : ahead + told.length;
  if (chunk.metrics) {
    answer.receipt = chunk.metrics;
    const { tpot_ms, ttft_ms, e2e_ms } = chunk.metrics.slo; // a tier may have objectives of its own
    answer.objective = { tpot_ms, ttft_ms, e2e_ms };
  }
  later();
}

// Many steps may come within one frame; each is drawn at most once.
let isDue = false;
function later() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    redraw();
  });
}

function redraw() {
  text.follow();
  showLegend(answer, drafters);
  showFigures(answer);
  showPace(answer);
  showAcceptance(answer);
}

// -- errors and the key ---------------------------------------------------------------------------

function tell(message) {
  const box = byId("error");
  box.hidden = message === "";
  box.textContent = message;
}

/** Fields of the form that have another name than what a refusal says is wrong. */
const CALLED = { messages: "prompt", service_tier: "tier", "speculation.max_tokens": "draft_tokens" };

function refuse(error) {
  if (error instanceof ApiError) {
    if (error.status === 401) return askForKey(error);
    tell(error.message);
    const name = CALLED[error.param] ?? error.param?.split(".").at(-1) ?? "";
    const field = form.querySelector(`[name="${CSS.escape(name)}"]`);
    if (field) {
      unfold(field);
      field.focus();
    }
  } else {
    tell("The server cannot be reached.");
  }
}

/** Show a field that is folded away: it can neither have the focus nor tell what is wrong with it. */
function unfold(field) {
  const box = field.closest("details");
  if (box) box.open = true;
}

/** Ask for a key, as the server did: for one at all, or for another than the one in use. */
function askForKey(error) {
  if (!isOfThisKey(error)) return;
  wantsKey = true;
  connection("needs a key", "warn");
  byId("key-button").hidden = false;
  byId("key-wrong").hidden = !hasKey();
  byId("key-wrong").textContent = error.status === 403 ? error.message : "This server does not know the key that was given.";
  if (!dialog.open) dialog.showModal();
}

byId("key-form").addEventListener("submit", () => {
  byId("key-wrong").hidden = true;
  useKey(byId("key").value.trim());
  byId("key").value = "";
  wantsKey = false;
  tell("");
  poll();
});
byId("key-cancel").addEventListener("click", () => dialog.close());
byId("key-button").addEventListener("click", () => dialog.showModal());

// -- the state ------------------------------------------------------------------------------------

function connection(word, kind) {
  const place = byId("connection");
  show(place, el("span", { class: `dot ${kind}`, "aria-hidden": "true" }), document.createTextNode(` ${word}`));
}

function offer(state) {
  const isNew = state.drafters.some((name) => !drafters.includes(name)) || drafters.some((name) => !state.drafters.includes(name));
  if (isNew) {
    const off = new Set([...form.querySelectorAll("[name=drafter]:not(:checked)")].map((box) => box.value));
    drafters = state.drafters;
    knowDrafters(drafters);
    byId("drafters").replaceChildren(...drafters.map((name) => {
      const box = el("input", { type: "checkbox", name: "drafter", value: name });
      box.checked = !off.has(name);
      return el("label", { class: "chip" }, box, el("span", {}, name));
    }));
    showLegend(answer, drafters);
  }
  choices(byId("tier"), state.tiers.map((tier) => tier.id));
  // Who may only ask the target names no model.
  const models = state.models.filter((name) => name !== state.model || state.models.length > 1);
  byId("model").parentElement.hidden = !models.length;
  choices(byId("model"), models);
}

/** Offer these names; the one chosen stays if it is still among them. */
function choices(list, names) {
  const before = [...list.options].map((option) => option.value);
  if (before.length === names.length && before.every((name, place) => name === names[place])) return;
  const chosen = list.value;
  list.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (names.includes(chosen)) list.value = chosen;
}

let heard = 0;
async function poll() {
  if (document.visibilityState === "hidden" || wantsKey) return;
  try {
    const state = await getState(AbortSignal.timeout(5000));
    heard = Date.now();
    connection("live", "good");
    offer(state);
    showHealth(state);
  } catch (error) {
    if (error.status === 401 || (error.status === 403 && hasKey())) askForKey(error);
    else connection(error.status ? error.message : "server not reachable", "bad");
  }
  byId("health-age").textContent = heard ? `at ${new Date(heard).toLocaleTimeString()}` : "";
}

async function keepPolling() {
  for (;;) {
    await poll();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

// -- start ----------------------------------------------------------------------------------------

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
form.elements.seed.addEventListener("input", ({ target }) => {
  const isExact = target.value === "" || Number.isSafeInteger(target.valueAsNumber);
  target.setCustomValidity(isExact ? "" : "A whole number of at most 53 bits: this page would send another one.");
});
form.addEventListener("invalid", (event) => unfold(event.target), { capture: true });
for (const box of form.querySelectorAll("[name=mode]")) {
  box.addEventListener("change", () => {
    byId("prompt-label").textContent = box.value === "chat" ? "Message" : "Prompt";
  });
}
byId("stop").addEventListener("click", () => running?.abort());
new ResizeObserver(() => showPace(answer)).observe(byId("pace"));
document.addEventListener("visibilitychange", () => poll());

tree.clear(answer.steps);
redraw();
keepPolling();
