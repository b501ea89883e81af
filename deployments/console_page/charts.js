// Lines over time, as SVG.

import { byId, el, milliseconds, number, svg } from "./dom.js";

const HEIGHT = 150;
const MARGIN = { left: 44, right: 14, top: 12, bottom: 22 };

const path = (points) => points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** A round number at or above `value`. */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((one) => one * unit).find((one) => one >= value * 0.999);
}

/** Digits after the point without which a number would be told as another, at most 5. */
const digitsOf = (value) => [0, 1, 2, 3, 4].find((digits) => Math.abs(value - value.toFixed(digits)) < 1e-3 * value) ?? 5;

/** The running mean time per output token against its objective, over the time since the request came. */
export function showPace(answer) {
  const box = byId("pace");
  const objective = answer.objective.tpot_ms;
  const points = answer.pace;
  if (points.length < 2) {
    box.replaceChildren(el("p", { class: "empty" }, "The mean time per token, as an answer grows, against its objective."));
    return;
  }
  const width = Math.max(220, box.clientWidth);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const [start, end] = [points[0][0], points.at(-1)[0]];
  // The first means are of few tokens; one of them must not flatten all the others.
  const settled = points.slice(Math.min(3, points.length - 1)).map(([, value]) => value);
  const top = roundUp(1.1 * Math.max(...settled, objective ?? 0, 1e-3));
  const x = (at) => MARGIN.left + (inner.width * (at - start)) / Math.max(end - start, 1e-9);
  const y = (value) => MARGIN.top + inner.height * (1 - Math.min(value, top) / top);
  const last = points.at(-1)[1];
  const isLate = objective !== null && last > objective;
  const digits = digitsOf(top / 2);
  const shapes = [0, top / 2, top].flatMap((value) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, digits)),
  ]);
  shapes.push(
    svg("text", { class: "tick", x: MARGIN.left, y: HEIGHT - 6 }, `${number(start, 0)} ms`),
    svg("text", { class: "tick", x: width - MARGIN.right, y: HEIGHT - 6, "text-anchor": "end" }, `${number(end, 0)} ms`),
    svg("path", { class: `line ${isLate ? "late" : ""}`, d: path(points.map(([at, value]) => [x(at), y(value)])) }),
    svg("circle", { class: `line-end ${isLate ? "late" : ""}`, cx: x(end), cy: y(last), r: 3.5 }),
  );
  if (objective !== null) {
    const height = y(objective);
    shapes.push(
      svg("line", { class: "objective", x1: MARGIN.left, x2: width - MARGIN.right, y1: height, y2: height }),
      svg("text", { class: "objective-label", x: width - MARGIN.right, y: height > 26 ? height - 5 : height + 13, "text-anchor": "end" },
        `objective ${objective} ms`),
    );
  }
  const said = `Mean time per output token: ${milliseconds(last)}${objective === null ? "" : `, objective ${objective} ms`}.`;
  box.replaceChildren(svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": said }, ...shapes));
}

/** A small line without axes. */
export function sparkline(values, label) {
  const [width, height] = [120, 26];
  const top = Math.max(...values, 1e-9);
  const points = values.map((value, place) => [(width * place) / Math.max(values.length - 1, 1), height - 2 - ((height - 4) * value) / top]);
  return svg("svg", { class: "sparkline", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
    svg("path", { class: "line", d: path(points) }));
}

/** A share, 0 to 1, as a bar in the colour of `tint`. */
export function bar(share, tint, label) {
  return svg("svg", { class: `bar ${tint}`, viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "meter",
    "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": share.toFixed(3) },
    svg("rect", { class: "whole", width: 100, height: 8 }),
    svg("rect", { class: "part", width: (100 * Math.min(1, share)).toFixed(2), height: 8 }));
}
