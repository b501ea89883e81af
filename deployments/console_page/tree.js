// The token tree of one step, drawn from the root on the left: drafted, verified, accepted.

import { byId, colour, el, enable, number, svg, visible } from "./dom.js";

const ROW = 28;
const HEIGHT = 22;
const GAP = 30;
const CHARACTER = 7.3;
const MOST_CHARACTERS = 12;

/** The nodes of a step's tree, and after the accepted ones the target's own token. */
function nodesOf(step) {
  const { tokens, texts, parents, logps, verified, accepted } = step.tree;
  const isVerified = new Set(verified);
  const isAccepted = new Set(accepted);
  const nodes = tokens.map((id, index) => ({
    id,
    text: texts[index],
    parent: parents[index],
    logp: logps[index],
    state: index === 0 ? "root" : isAccepted.has(index) ? "accepted" : isVerified.has(index) ? "verified" : "candidate",
    drafter: step.drafter,
  }));
  step.tokens.forEach((token, place) => {
    if (place < accepted.length) nodes[accepted[place]].drafter = token.drafter;
  });
  let above = accepted.at(-1) ?? 0;
  for (const token of step.tokens.slice(accepted.length)) {
    nodes.push({ id: token.id, text: token.text, parent: above, logp: null, state: "own", drafter: null });
    above = nodes.length - 1;
  }
  return nodes;
}

/** Give every node a place: columns by depth, leaves below each other, parents beside their children. */
function place(nodes) {
  nodes.forEach((node, index) => {
    node.children = [];
    node.depth = index ? nodes[node.parent].depth + 1 : 0;
    if (index) nodes[node.parent].children.push(node);
    const shown = [...visible(node.text, node.id)];
    node.label = shown.length > MOST_CHARACTERS ? `${shown.slice(0, MOST_CHARACTERS - 1).join("")}…` : shown.join("");
    node.width = Math.max(24, [...node.label].length * CHARACTER + 14);
  });
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const lefts = [1];
  widths.forEach((width, depth) => (lefts[depth + 1] = lefts[depth] + width + GAP));
  let leaves = 0;
  const settle = (node) => {
    node.children.forEach(settle);
    const first = node.children[0];
    node.y = first ? (first.y + node.children.at(-1).y) / 2 : ROW * leaves++ + ROW / 2;
    node.x = lefts[node.depth];
  };
  settle(nodes[0]);
  return { width: lefts.at(-1) - GAP + 1, height: ROW * leaves };
}

const STATES = { root: "the last token before the step", candidate: "drafted, not verified", verified: "verified, not accepted", accepted: "accepted", own: "the target's own" };

function nodeShape(node) {
  const told = [`${JSON.stringify(node.text)} (${node.id})`, `depth ${node.depth}`, STATES[node.state]];
  if (node.logp !== null && node.depth) told.push(`log-probability under the drafter, from the root: ${number(node.logp, 2)}`);
  const tint = node.state === "accepted" || node.state === "verified" || node.state === "candidate" ? colour(node.drafter) : "own";
  return svg("g", { class: `node ${node.state} ${tint}`, transform: `translate(${node.x} ${node.y})` },
    svg("title", {}, told.join("\n")),
    svg("rect", { y: -HEIGHT / 2, width: node.width, height: HEIGHT, rx: 5 }),
    svg("text", { x: node.width / 2, y: 4 }, node.label));
}

function edgeShape(node, parent) {
  const from = parent.x + parent.width;
  const middle = (from + node.x) / 2;
  const tint = node.state === "own" ? "own" : colour(node.drafter);
  return svg("path", { class: `edge ${node.state} ${tint}`,
    d: `M${from} ${parent.y}C${middle} ${parent.y} ${middle} ${node.y} ${node.x} ${node.y}` });
}

/** Draws one step of an answer at a time, the newest one unless another is chosen. */
export class TreeView {
  constructor(onShow) {
    this.onShow = onShow;
    this.steps = [];
    this.slider = byId("step");
    this.box = byId("tree");
    this.shown = -1;
    this.slider.addEventListener("input", () => this.show(this.slider.valueAsNumber - 1));
    byId("previous").addEventListener("click", () => this.show(this.shown - 1));
    byId("next").addEventListener("click", () => this.show(this.shown + 1));
    this.box.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      this.show(this.shown + by);
    });
  }

  clear(steps) {
    this.steps = steps;
    this.shown = -1;
    this.slider.disabled = true;
    this.slider.max = this.slider.value = 1;
    byId("previous").disabled = byId("next").disabled = true;
    byId("step-label").textContent = "no step";
    byId("tree-text").textContent = "";
    this.box.replaceChildren(el("p", { class: "empty" }, "Each step of an answer has a tree: what was drafted, and what the target made of it."));
  }

  /** A step came: draw it, if the newest one was being watched. */
  grown() {
    const last = this.steps.length - 1;
    this.slider.disabled = false;
    this.slider.max = last + 1;
    if (this.shown === last - 1) this.show(last);
    else this.#label();
  }

  show(index) {
    const step = this.steps[index];
    if (!step) return;
    this.shown = index;
    this.slider.value = index + 1;
    this.#label();
    const nodes = nodesOf(step);
    const { width, height } = place(nodes);
    const count = (...states) => nodes.filter((node) => states.includes(node.state)).length;
    const said = step.tokens.map((token) => visible(token.text, token.id)).join(" ");
    const tokens = count("candidate", "verified", "accepted");
    const summary = `Step ${step.step}: ${step.drafter ? `${step.drafter} drafted` : "nobody drafted;"} `
      + `${tokens === 1 ? "1 token" : `${tokens} tokens`}, ${count("verified", "accepted")} verified, ${count("accepted")} accepted. `;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${summary}Committed: ${said}` },
      ...nodes.slice(1).map((node) => edgeShape(node, nodes[node.parent])),
      ...nodes.map(nodeShape));
    this.box.replaceChildren(picture);
    byId("tree-text").textContent = `${summary}At ${number(step.at, 0)} ms.`;
    this.onShow(index);
  }

  #label() {
    byId("step-label").textContent = `${this.shown + 1} of ${this.steps.length}`;
    enable([[byId("previous"), this.shown > 0], [byId("next"), this.shown < this.steps.length - 1]], this.slider);
  }
}
