// Cells, drafters and objectives as they are now.

import { bar, sparkline } from "./charts.js";
import { byId, colour, el, milliseconds, number, percent, show } from "./dom.js";

const KEPT = 60;
const rates = new Map(); // tokens per second of each cell, newest last

// A cell counts those in the background by themselves.
const inAll = (cell, name) => number(cell[name] + (cell[`background_${name}`] ?? 0), 0);
const ofBackground = (cell, name) => (cell[`background_${name}`] ? ` (background ${number(cell[`background_${name}`], 0)})` : "");

const figure = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

function cellCard(cell) {
  const kept = rates.get(cell.id) ?? [];
  kept.push(cell.tokens_per_s ?? 0);
  rates.set(cell.id, kept.slice(-KEPT));
  const isWell = cell.state === "ready";
  const use = (cell.kv_use ?? 0) + (cell.background_kv_use ?? 0);
  return el("article", { class: "cell", "data-cell": cell.id },
    el("div", { class: "row between" },
      el("h4", {}, el("span", { class: `dot ${isWell ? "good" : "warn"}`, "aria-hidden": "true" }), ` ${shortId(cell.id)}`),
      el("span", { class: `badge ${isWell ? "good" : "warn"}` }, cell.state === "starting" && cell.stage ? cell.stage : cell.state)),
    el("dl", { class: "figures small" },
      figure("Running", `${inAll(cell, "running")} of ${number(cell.max_running, 0)}${ofBackground(cell, "running")}`),
      figure("Queue", `${inAll(cell, "waiting")}${ofBackground(cell, "waiting")}, ${milliseconds(1e3 * (cell.queue_s ?? 0))}`),
      figure("Step", milliseconds(1e3 * (cell.step_s ?? 0))),
      figure("TPOT predicted", milliseconds(1e3 * (cell.tpot_s ?? 0))),
      figure("On time now", cell.objectives ? percent(cell.attainment) : "–")),
    el("div", { class: "pair" },
      el("div", {}, el("span", { class: "hint" }, `KV cache ${percent(use)} of ${number(cell.kv_slots, 0)} tokens`
        + (cell.background_kv_use ? ` (background ${percent(cell.background_kv_use)})` : "")),
        bar(use, use < 0.8 ? "good" : use < 0.95 ? "warn" : "bad", "share of the KV cache in use")),
      el("div", {}, el("span", { class: "hint" }, `${number(cell.tokens_per_s, 0)} tokens/s`),
        sparkline(rates.get(cell.id), "tokens per second, last minute"))));
}

const shortId = (id) => (id.length > 22 ? `${id.slice(0, 8)}…${id.slice(-8)}` : id);

function poolTable(state) {
  const stateOf = new Map();
  for (const one of state.instances) {
    const told = one.waits_for ? `${one.state}: ${one.waits_for}` : one.state;
    stateOf.set(one.kind, [...(stateOf.get(one.kind) ?? []), { told, state: one.state, restarts: one.restarts }]);
  }
  const several = state.cells.length > 1;
  const heads = ["Drafter", ...(several ? ["Cell"] : []), "State", "Serves", "Accepted", "Price"];
  const lines = state.pool.map((one) => {
    const instances = stateOf.get(one.kind) ?? [];
    const restarts = instances.reduce((sum, instance) => sum + instance.restarts, 0);
    const isWell = instances.length ? instances.every((instance) => instance.state === "ready") : one.ready > 0;
    const told = one.kind === "grammar" ? "in the target" : instances.map((instance) => instance.told).join(", ") || (one.ready ? `${one.ready} ready` : "not ready");
    const share = one.verified ? percent(one.accepted / one.verified) : "–";
    return el("tr", {},
      el("th", { scope: "row" }, el("span", { class: `swatch ${colour(one.kind)}` }), one.kind),
      ...(several ? [el("td", {}, shortId(one.cell))] : []),
      el("td", { class: isWell || one.kind === "grammar" ? "" : "bad-text" }, told, restarts ? ` (${restarts} restarts)` : ""),
      el("td", {}, one.kind === "grammar" ? "–" : `${number(one.requests, 0)} of ${number(one.capacity, 0)}`),
      el("td", {}, share),
      el("td", {}, one.kind === "grammar" ? "–" : number(one.price, 1)));
  });
  if (!lines.length) return el("p", { class: "empty" }, "No drafters.");
  return el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((name) => el("th", { scope: "col", title: name === "Price" ? "Tokens per second that one more place would have brought" : null }, name)))),
    el("tbody", {}, ...lines));
}

function tierRows(state) {
  const judged = state.attainment.filter(({ attained, missed }) => attained + missed > 0);
  if (!judged.length) return [el("p", { class: "empty" }, "No finished request had objectives.")];
  return judged.map(({ tier, attained, missed }) => {
    const share = attained / (attained + missed);
    return el("div", { class: "tier" },
      el("span", {}, tier), bar(share, share >= 0.99 ? "good" : share >= 0.9 ? "warn" : "bad", `${tier}: share attained`),
      el("span", {}, `${percent(share)} of ${number(attained + missed, 0)}`));
  });
}

export function showHealth(state) {
  byId("about").replaceChildren(el("b", {}, state.model), ` · policy ${state.policy} · ${state.version}`);
  show(byId("cells"), ...(state.cells.length ? state.cells.map(cellCard) : [el("p", { class: "empty" }, "No cell reports itself.")]));
  show(byId("pool"), poolTable(state));
  show(byId("tiers"), ...tierRows(state));
  const { totals } = state;
  show(byId("totals"),
    figure("Requests", number(totals.requests, 0)),
    figure("Rejected", number(totals.rejected, 0)),
    figure("Output tokens", number(totals.output_tokens, 0)),
    figure("Preemptions", number(totals.preemptions, 0)),
    figure("Restarts", number(totals.restarts, 0)),
    figure("Front ends", `${state.front_ends.length}, ${number(state.front_ends.reduce((sum, one) => sum + one.streams, 0), 0)} streams`));
}
