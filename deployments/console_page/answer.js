// One answer: its steps and accounts, its text token by token, and who proposed what.

import { bar } from "./charts.js";
import { byId, colour, el, milliseconds, number, percent, visible } from "./dom.js";

/** What is known of an answer while it comes. Times are the cell's, in milliseconds. */
export class Answer {
  constructor(objective) {
    this.objective = objective;
    this.steps = [];
    this.tokens = [];
    this.proposed = new Map(); // tokens by who proposed them; null is the target
    this.drafted = new Map(); // by drafter: verified and accepted tokens
    this.pace = []; // [elapsed, mean time per token after the first]
    this.receipt = null;
    this.earlier = 0; // time of lives before a cell was lost
  }

  /** Take a step in; returns its tokens with what is told of each. */
  add(step) {
    const last = this.steps.at(-1);
    if (last && step.elapsed_ms + this.earlier < last.at) this.earlier = last.at;
    step.at = step.elapsed_ms + this.earlier;
    const index = this.steps.push(step) - 1;
    const tokens = step.tokens.map((token) => ({ ...token, index, number: step.step }));
    this.tokens.push(...tokens);
    for (const { drafter } of tokens) this.proposed.set(drafter, (this.proposed.get(drafter) ?? 0) + 1);
    if (step.drafter !== null) {
      const of = this.drafted.get(step.drafter) ?? { steps: 0, candidates: 0, verified: 0, accepted: 0 };
      const own = new Set(step.tree.accepted.filter((_, place) => step.tokens[place]?.drafter !== "grammar"));
      const forced = step.tree.accepted.length - own.size;
      of.steps += 1;
      of.candidates += step.tree.tokens.length - 1 - forced;
      of.verified += step.tree.verified.length - 1 - forced;
      of.accepted += own.size;
      this.drafted.set(step.drafter, of);
    }
    if (this.tokens.length > 1) this.pace.push([step.at, this.tpot]);
    return tokens;
  }

  get ttft() {
    return this.receipt?.time_to_first_token_ms ?? this.steps[0]?.at ?? null;
  }

  get tpot() {
    if (this.receipt) return this.receipt.tpot_ms;
    const first = this.steps[0];
    // Tokens of the first step after the first come at the same time as it.
    return this.tokens.length < 2 ? null : (this.steps.at(-1).at - first.at) / (this.tokens.length - 1);
  }
}

/** The text, and the tooltip that tells of each token. */
export class AnswerView {
  constructor(onSelect) {
    this.box = byId("answer");
    this.tip = byId("tip");
    this.current = null;
    this.follows = null; // whether the end was in view before what came since the last frame
    this.onSelect = onSelect;
    this.told = new WeakMap();
    this.box.addEventListener("pointerover", (event) => this.#point(event.target));
    this.box.addEventListener("pointerleave", () => this.#hide());
    this.box.addEventListener("blur", () => this.#hide());
    this.box.addEventListener("click", (event) => {
      if (this.told.has(event.target)) this.#focus(event.target);
    });
    this.box.addEventListener("keydown", (event) => this.#key(event));
    addEventListener("scroll", () => this.#hide(), { passive: true });
  }

  clear() {
    this.box.replaceChildren();
    this.current = null;
    this.#hide();
  }

  append(tokens) {
    // Asked once per frame: each time all that came is laid out anew, which of thousands of tokens takes long.
    this.follows ??= this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 24;
    for (const token of tokens) {
      const span = el("span", { class: `token ${colour(token.drafter)}`, "data-step": token.index }, token.text);
      this.told.set(span, token);
      this.box.append(span);
    }
  }

  /** Once per frame: keep the end in view, if it was. */
  follow() {
    if (this.follows) this.box.scrollTop = this.box.scrollHeight;
    this.follows = null;
  }

  /** Text that no step tells of: what was held back at the end. */
  appendText(text) {
    this.box.append(text);
  }

  mark(step) {
    for (const span of this.box.querySelectorAll(".of-step")) span.classList.remove("of-step");
    for (const span of this.box.querySelectorAll(`[data-step="${step}"]`)) span.classList.add("of-step");
  }

  #point(target) {
    const token = this.told.get(target);
    if (!token) return this.#hide();
    this.tip.replaceChildren(
      el("strong", {}, visible(token.text, token.id)),
      el("dl", {}, ...rows([
        ["token id", token.id],
        ["step", token.number],
        ["depth", token.depth],
        ["drafter", token.drafter ?? "none: the target's own"],
        ["logprob", token.logprob === null ? "–" : number(token.logprob, 3)],
      ])),
    );
    this.tip.hidden = false;
    const place = target.getBoundingClientRect();
    const { width, height } = this.tip.getBoundingClientRect();
    const below = place.bottom + 6 + height < innerHeight;
    this.tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - width - 8))}px`;
    this.tip.style.top = `${below ? place.bottom + 6 : place.top - height - 6}px`;
  }

  #hide() {
    this.tip.hidden = true;
  }

  #focus(span) {
    this.current?.classList.remove("current");
    this.current = span;
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    this.onSelect(this.told.get(span).index);
    this.#point(span);
    const token = this.told.get(span);
    byId("answer-status").textContent =
      `token ${token.id}, step ${token.number}, depth ${token.depth}, ${token.drafter ?? "the target's own"}`;
  }

  #key(event) {
    if (event.key === "Escape") return this.#hide();
    const spans = [...this.box.querySelectorAll(".token")];
    const place = spans.indexOf(this.current);
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    this.#focus(spans[to]);
  }
}

const rows = (pairs) => pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]);

export function showLegend(answer, drafters) {
  const names = [...drafters, ...answer.proposed.keys()].filter(
    (name, place, all) => name !== null && all.indexOf(name) === place,
  );
  const item = (name, label) =>
    el("li", { "data-drafter": name ?? "" }, el("span", { class: `swatch ${colour(name)}` }), `${label} `,
      el("b", {}, String(answer.proposed.get(name) ?? 0)));
  byId("legend").replaceChildren(...names.map((name) => item(name, name)), item(null, "target's own"));
}

function verdict(actual, objective, isFinal) {
  if (objective === null || actual === null) return null;
  const isMet = actual <= objective;
  const word = isFinal ? (isMet ? "attained" : "missed") : isMet ? "on time" : "late";
  return el("span", { class: `badge ${isMet ? "good" : "bad"}` }, word);
}

export function showFigures(answer) {
  const isFinal = answer.receipt !== null;
  const { tpot_ms: tpot, ttft_ms: ttft, e2e_ms: e2e = null } = answer.objective; // the last only of a tier, at the end
  const drafted = [...answer.drafted.values()];
  const sum = (name) => drafted.reduce((total, of) => total + of[name], 0);
  const figure = (id, name, value, note) =>
    el("div", { "data-figure": id }, el("dt", {}, name), el("dd", {}, value, ...(note ? [" ", note] : [])));
  byId("figures").replaceChildren(
    figure("tpot", tpot === null ? "TPOT" : `TPOT, objective ${tpot} ms`, milliseconds(answer.tpot),
      verdict(answer.tpot, tpot, isFinal)),
    figure("ttft", ttft === null ? "TTFT" : `TTFT, objective ${ttft} ms`, milliseconds(answer.ttft),
      verdict(answer.ttft, ttft, isFinal)),
    ...(e2e === null ? [] : [figure("e2e", `Last token, objective ${e2e} ms`, milliseconds(answer.receipt.e2e_ms),
      verdict(answer.receipt.e2e_ms, e2e, isFinal))]),
    figure("tokens", "Tokens", String(answer.tokens.length)),
    figure("per-step", "Tokens per step", answer.steps.length ? number(answer.tokens.length / answer.steps.length, 2) : "–"),
    figure("acceptance", "Accepted of verified", sum("verified") ? percent(sum("accepted") / sum("verified")) : "–"),
    ...(isFinal ? [figure("seed", "Seed", String(answer.receipt.seed))] : []),
  );
}

export function showAcceptance(answer) {
  const box = byId("acceptance");
  if (!answer.drafted.size) {
    box.replaceChildren(el("p", { class: "empty" }, answer.steps.length ? "Nobody drafted." : "Nothing drafted yet."));
    return;
  }
  const head = el("tr", {}, ...["Drafter", "Steps", "Drafted", "Verified", "Accepted", ""].map(
    (name, place) => el(place === 5 ? "td" : "th", place === 5 ? {} : { scope: "col" }, name)));
  const lines = [...answer.drafted].map(([name, of]) => {
    const share = of.verified ? of.accepted / of.verified : 0;
    const shown = bar(share, colour(name), `${name}: share accepted`);
    return el("tr", {}, el("th", { scope: "row" }, el("span", { class: `swatch ${colour(name)}` }), name),
      ...[of.steps, of.candidates, of.verified, of.accepted].map((value) => el("td", {}, String(value))),
      el("td", { class: "wide" }, shown, ` ${percent(share)}`));
  });
  box.replaceChildren(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines))));
}
